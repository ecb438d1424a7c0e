//! Interrupts over a fake kernel that records system calls, and signals eventfds.

use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use super::device::NAME;
use super::kernel::Kernel;
use crate::vfio::{Device, InterruptError, InterruptKind};

const CDEV: &str = "vfio/devices/vfio3";

/// The kernel's indices.
const INTX: u32 = 0;
const MSI: u32 = 1;
const MSIX: u32 = 2;
const REQUEST: u32 = 4;

/// A device with one INTx, 4 MSI and 8 MSI-X.
fn with_irqs() -> (Kernel, Device) {
    let kernel = Kernel::with(&["iommu", CDEV]);
    kernel.device(NAME, 7, Some("vfio3"));
    // EVENTFD is 1, MASKABLE 2, AUTOMASKED 4, NORESIZE 8.
    kernel.set(|kernel| kernel.irqs = [(7, 1), (9, 4), (9, 8), (0, 0), (9, 1)]);
    let device = Device::open(NAME).unwrap();
    kernel.asked();
    (kernel, device)
}

fn info(index: u32) -> String {
    format!("dev/vfio/devices/vfio3: DEVICE_GET_IRQ_INFO [10, 0, {index:x}, 0]")
}

/// A call with 20 bytes and its files: flags, index, start, count.
fn set(flags: u32, index: u32, (start, count): (u32, u32), files: &str) -> String {
    let bytes = 20 + 4 * files.split(' ').filter(|file| !file.is_empty()).count();
    format!(
        "dev/vfio/devices/vfio3: DEVICE_SET_IRQS [{bytes:x}, {flags:x}, {index:x}, {start:x}, {count:x}]{files}"
    )
}

fn off(index: u32) -> String {
    set(0x21, index, (0, 0), "")
}

#[test]
fn the_first_kind_of_which_there_are_enough_is_turned_on() {
    let (kernel, device) = with_irqs();
    let kinds = [
        (InterruptKind::MsiX, MSIX, 2, 1, " event event"),
        (InterruptKind::Msi, MSI, 2, 2, " event event"),
        (InterruptKind::Intx, INTX, 1, 3, " event"),
    ];
    for (kind, index, count, tried, files) in kinds {
        // Earlier kinds have too few.
        kernel.set(|kernel| (index + 1..3).for_each(|index| kernel.irqs[index as usize].1 = count - 1));
        let interrupts = device.interrupts(None, count).unwrap();
        let mut asked: Vec<_> = [MSIX, MSI, INTX].into_iter().take(tried).map(info).collect();
        asked.push(set(0x24, index, (0, count), files));
        assert_eq!(kernel.asked(), asked);
        assert!(interrupts.iter().all(|interrupt| interrupt.kind() == kind));
        assert!(interrupts.iter().map(|interrupt| interrupt.number()).eq(0..count));
        drop(interrupts);
        kernel.asked();
        // With a kind, no other is tried.
        let interrupts = device.interrupts(kind, count).unwrap();
        assert_eq!(kernel.asked(), [info(index), set(0x24, index, (0, count), files)]);
        drop(interrupts);
        kernel.asked();
    }
    assert_eq!(device.interrupts(None, 0).unwrap().len(), 0);
    assert_eq!(kernel.asked(), [""; 0]);
}

#[test]
fn each_interrupt_counts_its_own() {
    let (kernel, device) = with_irqs();
    let interrupts = device.interrupts(None, 3).unwrap();
    let can_read = |at: usize| {
        let mut poll =
            libc::pollfd { fd: interrupts[at].as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure, with an open file.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    };
    assert!((0..3).all(|at| !can_read(at)));
    for _ in 0..3 {
        assert!(kernel.raise(MSIX, 1));
    }
    assert!(kernel.raise(MSIX, 2));
    assert_eq!([0, 1, 2].map(can_read), [false, true, true]);
    assert_eq!(interrupts[1].wait().unwrap(), 3);
    assert_eq!(interrupts[2].wait_timeout(Duration::MAX).unwrap(), 1);
    for interrupt in &interrupts {
        assert_eq!(interrupt.count().unwrap(), 0);
        assert_eq!(interrupt.wait_timeout(Duration::ZERO).unwrap(), 0);
    }
    assert!(kernel.raise(MSIX, 0));
    assert_eq!(interrupts[0].count().unwrap(), 1);
    // It waits at least as long as requested.
    let begins = Instant::now();
    assert_eq!(interrupts[0].wait_timeout(Duration::from_micros(1500)).unwrap(), 0);
    assert!(begins.elapsed() >= Duration::from_micros(1500));
    // An interrupt ends the wait, and a signal to the thread does not.
    extern "C" fn nothing(_: i32) {}
    // SAFETY: the handler does nothing, and without SA_RESTART it interrupts a wait.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(i32) as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    std::thread::scope(|threads| {
        let (thread, of_thread) = std::sync::mpsc::channel();
        let interrupt = &interrupts[0];
        let waits = threads.spawn(move || {
            // SAFETY: it reads a number.
            thread.send(unsafe { libc::pthread_self() }).unwrap();
            interrupt.wait().unwrap()
        });
        let thread = of_thread.recv().unwrap();
        for _ in 0..20 {
            // SAFETY: the thread waits until the interrupt is raised, below.
            assert_eq!(unsafe { libc::pthread_kill(thread, libc::SIGUSR1) }, 0);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(kernel.raise(MSIX, 0));
        assert_eq!(waits.join().unwrap(), 1);
    });
}

#[test]
fn each_is_turned_off_in_whichever_order_they_go() {
    let (kernel, device) = with_irqs();
    for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
        let mut interrupts: Vec<_> = device.interrupts(None, 3).unwrap().into_iter().map(Some).collect();
        kernel.asked();
        for (gone, at) in order.into_iter().enumerate() {
            assert!(kernel.raise(MSIX, at));
            let error = device.interrupts(InterruptKind::Intx, 1).unwrap_err();
            assert!(matches!(error, InterruptError::InUse { .. }), "{error}");
            drop(interrupts[at as usize].take());
            let asked = if gone < 2 { set(0x24, MSIX, (at, 1), " none") } else { off(MSIX) };
            assert_eq!(kernel.asked(), [asked]);
            assert!(!kernel.raise(MSIX, at));
            assert!(order[gone + 1..].iter().all(|at| kernel.raise(MSIX, *at)), "the others go on");
        }
    }
    let error = InterruptError::InUse { name: NAME.into() }.to_string();
    let _one = device.interrupts(InterruptKind::Msi, 1).unwrap();
    assert_eq!(device.interrupts(None, 1).unwrap_err().to_string(), error);
    assert!(error.starts_with("0000:01:00.0 has interrupts in use"), "{error}");
}

#[test]
fn why_there_are_none_is_told() {
    let (kernel, device) = with_irqs();
    let why = |kind: Option<InterruptKind>, count| device.interrupts(kind, count).unwrap_err().to_string();
    assert_eq!(why(None, 9), "0000:01:00.0 has 8 interrupts of MSI-X or MSI or INTx at the most, and not 9");
    assert_eq!(
        why(Some(InterruptKind::Msi), u32::MAX).split(" at ").next(),
        Some("0000:01:00.0 has 4 interrupts of MSI")
    );
    // An index without eventfd support does not count.
    kernel.set(|kernel| kernel.irqs = [(6, 1), (0, 4), (8, 8), (0, 0), (0, 0)]);
    assert_eq!(why(None, 1), "0000:01:00.0 has 0 interrupts of MSI-X or MSI or INTx at the most, and not 1");
    let error = device.unplug_request().unwrap_err().to_string();
    assert_eq!(error, "0000:01:00.0 has 0 interrupts of the kind for unplug requests at the most, and not 1");
    // The machine may have fewer than the device. Nothing is on then.
    kernel.set(|kernel| (kernel.irqs, kernel.irqs_left) = ([(7, 1), (9, 2), (9, 8), (0, 0), (9, 1)], 3));
    assert_eq!(why(None, 4), "0000:01:00.0 has 3 interrupts of MSI-X or MSI or INTx at the most, and not 4");
    kernel.set(|kernel| kernel.irqs_left = 0);
    kernel.asked();
    for (call, code) in [("DEVICE_GET_IRQ_INFO", libc::EIO), ("DEVICE_SET_IRQS", libc::ENOTTY)] {
        kernel.set(|kernel| kernel.fails = vec![(call, code)]);
        let error = std::io::Error::from_raw_os_error(code);
        assert_eq!(why(None, 1), format!("VFIO_{call} failed: {error}"));
    }
    // A kernel that knows no such kind has none.
    kernel.set(|kernel| kernel.fails = vec![("DEVICE_GET_IRQ_INFO", libc::EINVAL)]);
    assert_eq!(why(None, 1), "0000:01:00.0 has 0 interrupts of MSI-X or MSI or INTx at the most, and not 1");
    kernel.set(|kernel| kernel.fails.clear());
    assert_eq!(device.interrupts(None, 1).unwrap().len(), 1, "after all of these none is in use");
}

#[test]
fn a_wire_is_unmasked_and_nothing_else() {
    let (kernel, device) = with_irqs();
    for (kind, index) in [(InterruptKind::MsiX, MSIX), (InterruptKind::Msi, MSI), (InterruptKind::Intx, INTX)]
    {
        let interrupt = device.interrupts(kind, 1).unwrap().pop().unwrap();
        kernel.asked();
        interrupt.unmask().unwrap();
        let unmasked = kernel.asked();
        assert_eq!(unmasked, if index == INTX { vec![set(0x11, INTX, (0, 1), "")] } else { vec![] });
        kernel.set(|kernel| kernel.fails = vec![("DEVICE_SET_IRQS", libc::EIO)]);
        assert_eq!(interrupt.unmask().is_err(), index == INTX);
        kernel.set(|kernel| kernel.fails.clear());
    }
}

#[test]
fn requests_to_unplug_come_beside_the_interrupts_of_the_device() {
    let (kernel, device) = with_irqs();
    let interrupts = device.interrupts(None, 1).unwrap();
    kernel.asked();
    let request = device.unplug_request().unwrap();
    assert_eq!(kernel.asked(), [info(REQUEST), set(0x24, REQUEST, (0, 1), " event")]);
    assert_eq!(request.kind(), InterruptKind::UnplugRequest);
    assert!(matches!(device.unplug_request(), Err(InterruptError::InUse { .. })));
    assert!(kernel.raise(REQUEST, 0) && kernel.raise(MSIX, 0) && kernel.raise(REQUEST, 0));
    assert_eq!((request.wait().unwrap(), interrupts[0].wait().unwrap()), (2, 1));
    drop(request);
    assert_eq!(kernel.asked(), [off(REQUEST)]);
    assert!(device.unplug_request().is_ok());
    assert!(kernel.raise(MSIX, 0), "the device's own go on");
}

/// The interrupts hold the device's file, and work without the device.
#[test]
fn interrupts_may_go_after_their_device() {
    let (kernel, device) = with_irqs();
    let interrupts = device.interrupts(None, 2).unwrap();
    kernel.asked();
    drop(device);
    assert!(kernel.raise(MSIX, 1) && kernel.is_open(CDEV));
    assert_eq!(interrupts[1].wait().unwrap(), 1);
    drop(interrupts);
    assert_eq!(kernel.asked(), [set(0x24, MSIX, (0, 1), " none"), off(MSIX)]);
    assert!(!kernel.is_open(CDEV));
}

#[test]
fn who_waits_for_a_device_that_is_released_is_told() {
    let (kernel, device) = with_irqs();
    let interrupts = device.interrupts(None, 1).unwrap();
    let request = device.unplug_request().unwrap();
    kernel.asked();
    let is_told = |error: std::io::Error| {
        assert_eq!(
            (error.kind(), error.to_string()),
            (ErrorKind::NotConnected, format!("{NAME} was released"))
        );
    };
    std::thread::scope(|threads| {
        // All concurrent waiters end.
        let waits: Vec<_> = (0..3).map(|_| threads.spawn(|| interrupts[0].wait())).collect();
        assert!(kernel.raise(REQUEST, 0));
        assert_eq!(request.wait().unwrap(), 1);
        device.release().unwrap();
        waits.into_iter().for_each(|waits| is_told(waits.join().unwrap().unwrap_err()));
    });
    is_told(interrupts[0].count().unwrap_err());
    is_told(request.wait_timeout(Duration::MAX).unwrap_err());
    drop((interrupts, request));
    let error = device.interrupts(None, 1).unwrap_err().to_string();
    assert_eq!(error, format!("VFIO_DEVICE_GET_IRQ_INFO failed: {NAME} was released"));
    assert_eq!(kernel.asked(), [""; 0], "they went with the file");
}
