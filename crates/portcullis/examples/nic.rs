//! A network card's driver, with a receive ring that is always full and a transmit ring. One line of `main` says how its queues
//! protect memory, and the driver does not know. The card sends each packet back, and after each unmap it tries to change the
//! packets that the driver has read.

use std::collections::VecDeque;
use std::error::Error;
use std::sync::Arc;

use portcullis::prelude::*;
use portcullis_model::{Buffer, Context, Iommu, IommuConfig, Memory};

const FRAME: u64 = 2048;
const POSTED: usize = 32;

/// The driver: generic in one parameter, whatever the machine, its IOMMU and the strategy.
struct Nic<X: Machine, B: DmaBuffer> {
    rx: Queue<X, Packet<B>>,
    tx: Queue<X, B>,
    posted: VecDeque<Mapping<Packet<B>>>,
    sending: VecDeque<Mapping<B>>,
    /// Buffers that are the driver's.
    free: Vec<B>,
    received: Vec<Packet<B>>,
}

/// A buffer with the length of the packet in it, which the card tells when it has written the packet.
type Packet<B> = (B, usize);

impl<X: Machine, B: DmaBuffer> Nic<X, B> {
    fn new(device: &Device<X>, config: QueueConfig, free: Vec<B>) -> Result<Self, Box<dyn Error>> {
        let (rx, tx) = (device.queue(config)?, device.queue(config)?);
        let (posted, sending) = (VecDeque::new(), VecDeque::new());
        Ok(Self { rx, tx, posted, sending, free, received: Vec::new() })
    }

    /// Gives the card buffers to receive into.
    fn refill(&mut self, hardware: &mut Hardware) -> Result<(), Box<dyn Error>> {
        while self.posted.len() < POSTED {
            let Some(buffer) = self.free.pop() else { break };
            let mapping = match self.rx.map((buffer, 0), Direction::FromDevice) {
                Ok(mapping) => mapping,
                Err(refused) => {
                    self.free.extend(refused.buffer.map(|(buffer, _)| buffer));
                    return Err(refused.error.into());
                }
            };
            hardware.rx.push_back((mapping.iova(), mapping.len()));
            self.posted.push_back(mapping);
        }
        Ok(())
    }

    /// The card has written `len` bytes to the oldest buffer.
    fn on_received(&mut self, len: usize) -> Result<(), Box<dyn Error>> {
        let mut mapping = self.posted.pop_front().ok_or("nothing is posted")?;
        *mapping.cookie_mut() = len;
        match self.rx.unmap(mapping) {
            Ok(Ended::Done(buffer)) => self.received.push(buffer),
            // The card can still write to it, so the queue keeps it.
            Ok(Ended::Pending) => {}
            Ok(Ended::Flushed(buffers)) => self.received.extend(buffers),
            Err(failed) => {
                // A mapping that comes back can end later. `unplug.rs` has all cases.
                self.posted.extend(failed.mapping);
                return Err(failed.error.into());
            }
        }
        Ok(())
    }

    fn send(&mut self, buffer: B, hardware: &mut Hardware) -> Result<(), Box<dyn Error>> {
        let mapping = match self.tx.map(buffer, Direction::ToDevice) {
            Ok(mapping) => mapping,
            Err(refused) => {
                self.free.extend(refused.buffer);
                return Err(refused.error.into());
            }
        };
        hardware.tx.push_back((mapping.iova(), mapping.len()));
        self.sending.push_back(mapping);
        Ok(())
    }

    /// The card has sent the oldest.
    fn on_sent(&mut self) -> Result<(), Box<dyn Error>> {
        let mapping = self.sending.pop_front().ok_or("nothing is being sent")?;
        match self.tx.unmap(mapping) {
            Ok(ended) => ended.for_each(|buffer| self.free.push(buffer)),
            Err(failed) => {
                self.sending.extend(failed.mapping);
                return Err(failed.error.into());
            }
        }
        Ok(())
    }

    /// No more interrupts for now: nothing is to wait for a batch that does not become complete.
    fn on_idle(&mut self) -> Result<(), Box<dyn Error>> {
        self.received.extend(self.rx.commit()?);
        self.free.extend(self.tx.commit()?);
        Ok(())
    }

    /// The card receives no more.
    fn on_stopped(&mut self) -> Result<(), DmaUnmapError> {
        let posted = std::mem::take(&mut self.posted);
        self.rx.unmap_all(posted, |ended| match ended {
            Ok((buffer, _)) => self.free.push(buffer),
            Err(failed) => self.posted.extend(failed.mapping),
        })
    }
}

/// The card: it does what its rings say.
struct Hardware {
    iommu: Arc<Iommu>,
    id: DeviceId,
    rx: VecDeque<(Iova, u64)>,
    tx: VecDeque<(Iova, u64)>,
    sent: Vec<Vec<u8>>,
    /// Where it was once told to write.
    seen: Vec<Iova>,
}

impl Hardware {
    fn receive(&mut self, packet: &[u8]) -> Result<(), Box<dyn Error>> {
        let (iova, _) = self.rx.pop_front().ok_or("no room: the packet is dropped")?;
        self.seen.push(iova);
        Ok(self.iommu.dma_write(self.id, iova, packet)?)
    }

    fn transmit(&mut self, len: usize) -> Result<(), Box<dyn Error>> {
        let (iova, _) = self.tx.pop_front().ok_or("nothing to send")?;
        let mut packet = vec![0; len];
        self.iommu.dma_read(self.id, iova, &mut packet)?;
        self.sent.push(packet);
        Ok(())
    }
}

fn run(name: &str, config: QueueConfig) -> Result<(), Box<dyn Error>> {
    // The machine.
    let memory = Memory::new(64 << 20);
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    let (id, card) = (DomainId(1), DeviceId(3));
    let platform = StdPlatform::new();
    let table = PageTable::new(Arc::clone(&memory), VtdSecondStage::four_level())?;
    iommu.attach(card, Context::SecondStage { domain: id, root: table.root(), levels: 4 });
    // The front door.
    let domain = Domain::builder(table, iommu.queue(), id)
        .policy(Policy::Strict)
        .bounce(Arc::clone(&memory), PoolConfig::default())
        .build(platform)?;
    let device = domain.attach(card, DmaMask::BITS_64)?;

    let free: Vec<Buffer> = (0..128).filter_map(|_| memory.buffer(FRAME)).collect();
    let all = free.len();
    let mut nic = Nic::new(&device, config, free)?;
    let (rx, tx) = (VecDeque::new(), VecDeque::new());
    let mut hardware =
        Hardware { iommu: Arc::clone(&iommu), id: card, rx, tx, sent: Vec::new(), seen: Vec::new() };
    let (mut echoed, mut refused, mut copies) = (0_usize, 0_u32, 0_u32);
    for round in 0..200_u32 {
        nic.refill(&mut hardware)?;
        let packet = format!("packet {round}");
        hardware.receive(packet.as_bytes())?;
        nic.on_received(packet.len())?;
        if round % 50 == 49 {
            nic.on_idle()?;
        }
        // Each packet that has come is sent back.
        for (buffer, len) in std::mem::take(&mut nic.received) {
            let mut packet = vec![0; len];
            buffer.read(0, &mut packet)?;
            assert_eq!(packet, format!("packet {echoed}").as_bytes());
            // The card tries to change the packet that was read.
            for iova in hardware.seen.iter().filter(|iova| !hardware.rx.iter().any(|(live, _)| live == *iova))
            {
                match hardware.iommu.dma_write(card, *iova, b"too late") {
                    Ok(()) => copies += 1,
                    Err(_) => refused += 1,
                }
            }
            let before = packet.clone();
            buffer.read(0, &mut packet)?;
            assert_eq!(packet, before, "what was received stays as it was");
            nic.send(buffer, &mut hardware)?;
            hardware.transmit(len)?;
            assert_eq!(hardware.sent[echoed], packet);
            nic.on_sent()?;
            echoed += 1;
        }
    }
    assert_eq!(echoed, 200);
    // The link goes down.
    nic.on_stopped()?;
    nic.on_idle()?;
    assert_eq!(nic.free.len(), all, "every buffer came back");
    println!("{name:<8} {:>20} {refused:>20} {copies:>23}", iommu.stats().waits);
    Ok(())
}

/// The same by each strategy.
///
/// # Errors
/// What did not work.
pub fn main() -> Result<(), Box<dyn Error>> {
    println!("200 packets came and went by each strategy, and none was changed behind the driver's back.");
    println!("         waits for the IOMMU  late writes refused  late writes to a copy");
    run("direct", QueueConfig::direct())?;
    run("batched", QueueConfig::batched(16))?;
    run("ring", QueueConfig::ring(64, 4096).batch(16))?;
    run("bounce", QueueConfig::bounce())?;
    run("auto", QueueConfig::auto(64, 4096).batch(16))?;
    println!("(Most waits of auto are of its measuring, when a queue is made.)");
    Ok(())
}
