//! A mapper that tells the test of each step, before it goes on.

use portcullis::addr::{IovaRange, PhysAddr};
use portcullis::heap::{OutOfMemory, Shared};
use portcullis::invalidation::{Costs, Gather, InvalidationError};
use portcullis::mapper::{Geometry, Mapper};
use portcullis::percpu::{Marks, Turn};
use portcullis::pgtable::{Attributes, MapError, Unmapped};
use portcullis::platform::Platform;
use portcullis_model::open::Simulated;

/// Where the mapper is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// It asks for the next piece to map in `range`. So many bytes of that are entered.
    Piece { range: IovaRange, entered: u64 },
    /// It has entered all that it was asked to, or failed to.
    Mapped,
    /// It is about to remove something.
    Unmap,
    /// It has removed it.
    Unmapped,
    /// It is about to invalidate.
    Sync,
}

/// `M`, and who is told.
pub struct Observed<M> {
    inner: M,
    observer: Box<dyn Fn(Moment) + Send + Sync>,
    /// Whether `M`'s fast paths are taken, of which nobody is told.
    is_quick: bool,
}

impl<M> Observed<M> {
    pub fn new(inner: M, observer: impl Fn(Moment) + Send + Sync + 'static) -> Self {
        Self { inner, observer: Box::new(observer), is_quick: false }
    }

    /// The same; what the mapper does quickly it does, and tells nobody.
    pub fn with_fast_paths(inner: M, observer: impl Fn(Moment) + Send + Sync + 'static) -> Self {
        Self { is_quick: true, ..Self::new(inner, observer) }
    }
}

// SAFETY: it is what it is made of.
unsafe impl<M: Simulated> Simulated for Observed<M> {}

// SAFETY: all changes and waits are `M`'s.
unsafe impl<M: Mapper> Mapper for Observed<M> {
    const IS_QUICK: bool = M::IS_QUICK;
    const REMOVES_WHOLES: bool = M::REMOVES_WHOLES;

    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn costs(&self) -> Costs {
        self.inner.costs()
    }

    fn set_cpus(&mut self, cpus: usize) -> Result<(), OutOfMemory> {
        self.inner.set_cpus(cpus)
    }

    unsafe fn map<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        let mut entered = 0;
        let tell = |piece: (PhysAddr, u64)| {
            (self.observer)(Moment::Piece { range, entered });
            entered += piece.1;
            piece
        };
        // SAFETY: the caller's promise.
        let result =
            unsafe { self.inner.map(platform, range, list.into_iter().map(tell), attributes, gather) };
        (self.observer)(Moment::Mapped);
        result
    }

    fn marks<P: Platform>(&self, platform: &P) -> Option<&Shared<Marks>> {
        self.inner.marks(platform)
    }

    unsafe fn map_fast(
        &self,
        turn: &Turn<'_>,
        range: IovaRange,
        phys: PhysAddr,
        attributes: Attributes,
    ) -> bool {
        // SAFETY: the caller's promise.
        self.is_quick && unsafe { self.inner.map_fast(turn, range, phys, attributes) }
    }

    unsafe fn map_list_fast(
        &self,
        turn: &Turn<'_>,
        range: IovaRange,
        list: impl ExactSizeIterator<Item = (PhysAddr, u64)> + Clone,
        attributes: Attributes,
    ) -> bool {
        // SAFETY: the caller's promise.
        self.is_quick && unsafe { self.inner.map_list_fast(turn, range, list, attributes) }
    }

    fn unmap_fast(&self, turn: &Turn<'_>, range: IovaRange) -> bool {
        self.is_quick && self.inner.unmap_fast(turn, range)
    }

    fn unmap<P: Platform>(&self, platform: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        (self.observer)(Moment::Unmap);
        let unmapped = self.inner.unmap(platform, range, gather);
        (self.observer)(Moment::Unmapped);
        unmapped
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        (self.observer)(Moment::Sync);
        self.inner.sync(gather)
    }

    fn sync_range(&self, range: IovaRange) -> Result<(), InvalidationError> {
        (self.observer)(Moment::Sync);
        self.inner.sync_range(range)
    }

    fn reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        self.inner.reclaim(platform)
    }

    fn try_reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        self.inner.try_reclaim(platform)
    }
}
