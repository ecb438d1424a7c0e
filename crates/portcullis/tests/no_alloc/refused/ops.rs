//! The life of a handle for a kernel's own DMA API: every call of it, in every configuration.

use portcullis::addr::{Direction, DmaSegment, Iova, PhysSegment};
use portcullis::dma::{DmaAttributes, DmaOps, OpsConfig};
use portcullis::domain::Policy;
use portcullis::platform::PlatformEvents;

use super::{Ground, Life, Machine, PAGE, lives};

const CONFIGS: [OpsConfig; 4] = [
    OpsConfig::Strict,
    OpsConfig::Lazy { window_ns: 1 << 40 },
    OpsConfig::Bounce { threshold: 64 << 10 },
    OpsConfig::Auto { threshold: 64 << 10 },
];

const DIRECTIONS: [Direction; 3] = [Direction::FromDevice, Direction::Bidirectional, Direction::ToDevice];

/// An address and length that end a mapping.
type Open = (Iova, u64);

impl Life<'_> {
    fn map_list(&mut self, ops: &DmaOps<Machine>, list: &[PhysSegment], direction: Direction) -> Open {
        let mut out = [DmaSegment::default(); 3];
        // SAFETY: the memory is the test's, which does not touch it.
        let count = self.step("a list's map", || unsafe {
            ops.map_sg(list, direction, DmaAttributes::default(), &mut out)
        });
        let (first, last) = (out[0].iova, out[count - 1]);
        (first, last.iova.get() + last.len - first.get())
    }

    fn unmap(&self, ops: &DmaOps<Machine>, (iova, len): Open, skip_copy: bool) {
        // SAFETY: as above; the mapping is the caller's.
        self.end("an unmap", unsafe {
            ops.unmap(iova, len, DmaAttributes { skip_copy, ..DmaAttributes::default() })
        });
    }

    /// All of it, with a handle that is made as `config` and goes through all others.
    fn live_by_number(&mut self, config: OpsConfig, trusted: bool) -> u64 {
        let device = self.device(Policy::Strict, false);
        let device = if trusted { device.trusted() } else { device };
        let ops = self.step("a handle", || device.ops(config));
        let ground: &Ground = self.ground;
        let mut kept = [None; CONFIGS.len() * DIRECTIONS.len()];
        let mut places = kept.iter_mut();
        for (cpu, config) in [0, 2].into_iter().cycle().zip(CONFIGS) {
            ground.platform.be(cpu);
            self.step("another configuration", || ops.set_config(config));
            for direction in DIRECTIONS {
                for list in ground.lists.iter().step_by(2) {
                    let open = self.map_list(&ops, list.0, direction);
                    let len = open.1.min(64);
                    // SAFETY: as above.
                    let synced =
                        unsafe { ops.sync_for_cpu(open.0, len).and(ops.sync_for_device(open.0, len)) };
                    self.end("a sync", synced);
                    self.unmap(&ops, open, direction == Direction::FromDevice);
                }
                let PhysSegment { phys, len } = ground.lists[3].0[0];
                for attributes in [
                    DmaAttributes::default(),
                    DmaAttributes { mmio: true, ..DmaAttributes::default() },
                    DmaAttributes { lasting: true, ..DmaAttributes::default() },
                    DmaAttributes { skip_copy: true, ..DmaAttributes::default() },
                ] {
                    // SAFETY: as above.
                    let iova = self.step("a map", || unsafe { ops.map(phys, len, direction, attributes) });
                    self.unmap(&ops, (iova, len), false);
                }
                // What stays: for the end of all.
                *places.next().unwrap() = Some(self.map_list(&ops, ground.lists[2].0, direction));
            }
            self.end("maintenance", ops.maintain());
        }
        self.step("a narrower mask", || ops.set_limits(0xffff_ffff, PAGE - 1));
        self.map_list(&ops, ground.lists[1].0, Direction::ToDevice);
        self.unmap(&ops, kept[0].unwrap(), false);
        // SAFETY: the device is the model's, and reaches nothing unasked.
        let (mappings, _) = self.end("the end of all", unsafe { ops.unmap_all() });
        assert_eq!(mappings, kept.len() as u64, "{}", self.which());
        assert_eq!(ops.usage().open_bytes, 0, "{}", self.which());
        let space = device.domain().space().clone();
        self.end("a flush", space.flush());
        ground.platform.be(0);
        self.end("a reclaim", space.reclaim());
        (0..2).for_each(|cpu| space.cpu_released(cpu));
        self.addresses_out(&device)
    }
}

#[test]
fn handles_for_a_kernel_s_own_api_survive_every_refusal() {
    let ground = Ground::new();
    for (config, trusted, once) in [
        (OpsConfig::Strict, false, true),
        (OpsConfig::Lazy { window_ns: 1 << 40 }, true, false),
        (OpsConfig::Bounce { threshold: 64 << 10 }, false, false),
        (OpsConfig::Auto { threshold: 64 << 10 }, true, true),
    ] {
        let name = format!("{config:?}, trusted {trusted}, once {once}");
        let requests = lives(&ground, &name, once, |life| life.live_by_number(config, trusted));
        assert!(requests > 20, "{name}: {requests}");
    }
}
