//! Interrupts that devices raise, as the process gets them.

use std::time::Duration;

use portcullis_linux::vfio::InterruptKind;

use crate::edu::Edu;
use crate::{Result, Way, check};

/// By when whatever is raised has come: far beyond what it takes.
const SOON: Duration = Duration::from_secs(30);
/// For how long whatever must not come is waited for.
const WHILE: Duration = Duration::from_millis(300);

/// One by a message, and by a wire, which is masked after each.
pub fn of_edu(way: Way, name: &str) -> Result<()> {
    let device = way.open(name)?;
    let edu = Edu::new(&device)?;
    let none =
        device.interrupts(InterruptKind::MsiX, 1).map(|all| all.len()).map_err(|error| error.to_string());
    let says = format!("{name} has 0 interrupts of MSI-X at the most, and not 1");
    check("what a device has not is refused", none.as_ref().is_err_and(|error| *error == says), &none);

    let interrupt = device.interrupts(None, 1)?.pop().ok_or("there is one")?;
    check("edu has MSI", interrupt.kind() == InterruptKind::Msi, interrupt.kind());
    check("before it is raised none comes", interrupt.count()? == 0, "one did");
    for round in 0..3 {
        edu.raise()?;
        let count = interrupt.wait_timeout(SOON)?;
        edu.acknowledge()?;
        let more = interrupt.count()?;
        check(&format!("MSI {round}: one comes for one"), (count, more) == (1, 0), (count, more));
    }
    let other =
        device.interrupts(InterruptKind::Intx, 1).map(|all| all.len()).map_err(|error| error.to_string());
    check("one kind is in use at a time", other.is_err(), &other);
    drop(interrupt);

    let interrupt = device.interrupts(InterruptKind::Intx, 1)?.pop().ok_or("there is one")?;
    for round in 0..3 {
        edu.raise()?;
        let count = interrupt.wait_timeout(SOON)?;
        edu.acknowledge()?;
        edu.raise()?;
        let masked = interrupt.wait_timeout(WHILE)?;
        check(&format!("INTx {round}: one comes, and is masked"), (count, masked) == (1, 0), (count, masked));
        // What was raised meanwhile comes then.
        interrupt.unmask()?;
        let count = interrupt.wait_timeout(SOON)?;
        edu.acknowledge()?;
        interrupt.unmask()?;
        let more = interrupt.wait_timeout(WHILE)?;
        check(&format!("INTx {round}: unmasked, the next comes"), (count, more) == (1, 0), (count, more));
    }
    // The device, the interrupt, and the registers go in another order than they came.
    drop(device);
    drop(interrupt);
    edu.raise()?;
    edu.acknowledge()?;
    drop(edu);
    let again = way.open(name)?.interrupts(None, 1).map(|all| all.len()).map_err(|error| error.to_string());
    check("all that is dropped leaves the device to the next", again == Ok(1), &again);
    Ok(())
}

/// Registers of Intel's 82574 (datasheet, 10.2.4): one whose bit 26 resets the card, what was raised, what raises it, which of that is let
/// through, and which message each has.
const CTRL: usize = 0;
const ICR: usize = 0x00c0;
const ICS: usize = 0x00c8;
const IMS: usize = 0x00d0;
const IVAR: usize = 0x00e4;
/// In all but the last, the first bit of four: two queues receive, and two send.
const FIRST: u32 = 20;

/// Four messages of a network card's MSI-X, each by itself. (QEMU's card repeats a message when its time to the next is over.)
pub fn of_card(way: Way, name: &str) -> Result<()> {
    let device = way.open(name)?;
    device.set_bus_master(true)?;
    let registers = device.bar(0)?;
    let write = |register, value| registers.write32(register, value).ok_or("no register");
    let mut interrupts: Vec<_> = device.interrupts(None, 4)?.into_iter().map(Some).collect();
    write(ICR, u32::MAX)?;
    // Each by the message of its number: of four bits the highest says that it is valid.
    write(IVAR, (0..4).fold(0, |all, number| all | (8 | number) << (4 * number)))?;
    write(IMS, 0xf << FIRST)?;
    let (order, dropped) = ([2, 0, 3, 1], 3);
    drop(interrupts[dropped].take());
    for (at, number) in order.into_iter().enumerate() {
        write(ICS, 1 << (FIRST as usize + number))?;
        let Some(interrupt) = &interrupts[number] else { continue };
        let came = interrupt.wait_timeout(SOON)?;
        let later = order[at + 1..].iter().filter_map(|later| interrupts[*later].as_ref());
        let later = later.map(|interrupt| interrupt.count()).collect::<std::io::Result<Vec<_>>>()?;
        let is_alone = came > 0 && later.iter().all(|count| *count == 0);
        check(
            &format!("message {number} of MSI-X comes, and none that was not sent"),
            is_alone,
            (came, &later),
        );
    }
    let kinds: Vec<_> = interrupts.iter().flatten().map(|one| (one.kind(), one.number())).collect();
    let wanted = [0, 1, 2].map(|number| (InterruptKind::MsiX, number));
    check("the card has MSI-X", kinds == wanted, &kinds);
    // What it would repeat is over with it, while the messages are on. Once they are off, it would keep that for who has it next, where
    // the kernel has no way to reset it.
    write(CTRL, 1 << 26)?;
    Ok(())
}
