//! Borrowed buffers, over a fake kernel.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use portcullis::addr::{Iova, Permissions};
use portcullis::dma::{DmaDomain, DmaMapError, DmaMask, Queue, QueueConfig};
use portcullis::domain::{Domain, MapListError, Policy};
use portcullis::std_platform::StdPlatform;

use super::fake::{Fake, PAGE, Way};
use crate::heap::Heap;
use crate::vfio::{Machine, scope};

const READ: Permissions = Permissions::READ;
const WRITE: Permissions = Permissions::WRITE;
const BOTH: Permissions = Permissions::READ_WRITE;

fn queue(fake: &Arc<Fake>, config: QueueConfig) -> Queue<Machine> {
    let space = Domain::new(StdPlatform::new(), fake.mapper(), Policy::Strict).unwrap();
    let domain = DmaDomain::<Machine>::over(space, Some(Heap)).unwrap();
    let device = domain.attach(portcullis::addr::DeviceId(8), DmaMask::BITS_64).unwrap();
    device.queue(config).unwrap()
}

#[repr(align(4096))]
struct Page([u8; PAGE as usize]);

const CONFIGS: [QueueConfig; 3] =
    [QueueConfig::direct(), QueueConfig::batched(8), QueueConfig::ring(8, PAGE)];

#[test]
fn a_device_reaches_what_is_borrowed_while_the_scope_runs() {
    for config in CONFIGS {
        let fake = Fake::new(Way::Iommufd);
        let mut queue = queue(&fake, config);
        let (mut both, mut written, read) =
            (Page([1; PAGE as usize]), Page([2; PAGE as usize]), Page([3; PAGE as usize]));
        let at = [both.0.as_ptr(), written.0.as_ptr(), read.0.as_ptr()].map(|at| at.addr() as u64);
        let count = scope(&mut queue, |scope| {
            let iovas = [
                scope.map(&mut both.0[100..]).unwrap(),
                scope.map_for_write(&mut written.0).unwrap(),
                scope.map_for_read(&read.0).unwrap(),
            ];
            let found = iovas.map(|iova: Iova| fake.reaches(iova.get()));
            assert_eq!(found, [Some((at[0] + 100, BOTH)), Some((at[1], WRITE)), Some((at[2], READ))]);
            fake.count()
        });
        assert_eq!((count, fake.count(), queue.waiting()), (3, 0, 0), "{config:?}");
        assert_eq!((both.0[0], written.0[0]), (1, 2));
    }
}

#[test]
fn a_panic_and_a_refusal_leave_nothing_mapped() {
    for config in CONFIGS {
        let fake = Fake::new(Way::Iommufd);
        let mut queue = queue(&fake, config);
        let (mut first, mut second) = (Page([1; PAGE as usize]), Page([2; PAGE as usize]));
        let mapped = Cell::new(0);
        let left = catch_unwind(AssertUnwindSafe(|| {
            scope(&mut queue, |scope| {
                scope.map(&mut first.0).unwrap();
                mapped.set(fake.count());
                panic!("the driver does");
            })
        }));
        assert_eq!((left.is_err(), mapped.get(), fake.count()), (true, 1, 0), "{config:?}");
        let refused = scope(&mut queue, |scope| {
            scope.map(&mut first.0).unwrap();
            let empty = scope.map(&mut []);
            assert!(matches!(empty, Err(DmaMapError::List(MapListError::EmptySegment { .. }))), "{empty:?}");
            *fake.fails.lock().unwrap() = Some((fake.calls.load(Ordering::Relaxed), libc::EFAULT));
            scope.map(&mut second.0)
        });
        assert!(matches!(refused, Err(DmaMapError::List(MapListError::Map(_)))), "{refused:?}");
        assert_eq!(fake.count(), 0);
    }
}

/// Set in the process that aborts.
const ABORTED: &str = "PORTCULLIS_TEST_ABORTED";

#[test]
fn a_mapping_that_the_kernel_keeps_ends_the_process() {
    if std::env::var_os(ABORTED).is_some() {
        let fake = Fake::new(Way::Iommufd);
        let mut queue = queue(&fake, QueueConfig::direct());
        let mut page = Page([1; PAGE as usize]);
        scope(&mut queue, |scope| {
            scope.map(&mut page.0).unwrap();
            fake.stuck.store(0, Ordering::Relaxed);
        });
        println!("went on");
        return;
    }
    let name = "vfio::tests::scope::a_mapping_that_the_kernel_keeps_ends_the_process";
    let mut again = std::process::Command::new(std::env::current_exe().unwrap());
    let out = again.args(["--exact", name, "--nocapture"]).env(ABORTED, "").output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("may still reach memory that was borrowed"), "{said}");
    assert!(out.status.code().is_none(), "a signal ends it: {}", out.status);
    assert!(!String::from_utf8_lossy(&out.stdout).contains("went on"));
}
