//! A device handle whose drop panics.

use std::panic::{AssertUnwindSafe, catch_unwind};

use portcullis::addr::Direction;
use portcullis::dma::{Handle, Mapped, UnmapBatch};
use portcullis::pgtable::VtdSecondStage;
use portcullis::std_platform::StdPlatform;

use crate::machine::{Device, Machine, PAGE, Tables};

struct Bomb(Device<true>);

// SAFETY: always the same device.
unsafe impl Handle for Bomb {
    type Mapper = Tables<true, VtdSecondStage>;
    type Platform = StdPlatform;

    fn device(&self) -> &Device<true> {
        &self.0
    }
}

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("as the test wants");
    }
}

/// Into a batch of its own domain, and into another's, which refuses it.
#[test]
fn a_buffer_whose_handle_panics_is_not_freed_before_it_is_out_of_reach() {
    for is_own in [true, false] {
        let (machine, other) = (Machine::<true>::new(), Machine::<true>::new());
        let buffer = machine.memory.buffer(PAGE).unwrap();
        let phys = buffer.phys();
        let mapped = Mapped::new(Bomb(machine.device.clone()), buffer, Direction::Bidirectional).unwrap();
        let iova = mapped.iova();
        assert_eq!(machine.reached(iova, PAGE), 1);
        let mut batch = UnmapBatch::new(if is_own { &machine.device } else { &other.device }, 4);
        let unmapped =
            catch_unwind(AssertUnwindSafe(|| batch.unmap(mapped).map_err(std::mem::forget).is_ok()));
        assert!(unmapped.is_err() || !is_own, "the handle is dropped");
        let safe = || machine.memory.is_allocated(phys) || machine.reached(iova, PAGE) == 0;
        assert!(safe(), "own: {is_own}");
        let back = batch.commit().map_err(drop);
        assert!(safe(), "own: {is_own}");
        drop(back);
        assert!(safe(), "own: {is_own}");
    }
}
