//! AMD-Vi: a command buffer and an event log of one frame each.

use portcullis::platform::Frames;

use super::{Kind, Software, Watcher};
use crate::amdvi::layout::{command, control, entry, feature, reg, ring_index, ring_place, status};

/// An AMD-Vi unit.
#[derive(Debug)]
pub struct AmdVi;

impl Kind for AmdVi {
    const RESET: &'static [(usize, u32)] = &[(reg::EXTENDED_FEATURE, feature::IA_SUP as u32)];

    fn taken<F: Frames>(_: &Software<Self, F>, offset: usize, old: u32, value: u32) -> u32 {
        const CLEARED: u32 = (status::EVENT_OVERFLOW | status::EVENT_LOG_INT | status::COM_WAIT_INT) as u32;
        match offset {
            reg::STATUS => old & !(value & CLEARED),
            reg::EXTENDED_FEATURE | reg::EVENT_TAIL => old,
            _ => value,
        }
    }

    fn written<F: Frames>(unit: &Software<Self, F>, offset: usize, _: u32, watcher: Option<&Watcher>) {
        if offset == reg::CONTROL {
            let told = unit.get64(reg::CONTROL);
            let runs = |enable: u64, runs: u64| {
                if told & control::IOMMU_EN != 0 && told & enable != 0 { runs } else { 0 }
            };
            let running = runs(control::CMD_BUF_EN, status::CMD_BUF_RUN)
                | runs(control::EVENT_LOG_EN, status::EVENT_LOG_RUN);
            let rest = unit.get64(reg::STATUS) & !(status::CMD_BUF_RUN | status::EVENT_LOG_RUN);
            unit.set64(reg::STATUS, rest | running);
        }
        if unit.get64(reg::STATUS) & status::CMD_BUF_RUN == 0 {
            return;
        }
        let base = unit.get64(reg::COMMAND_BASE) & entry::ADDRESS;
        let tail = ring_index(unit.get64(reg::COMMAND_TAIL));
        let mut head = ring_index(unit.get64(reg::COMMAND_HEAD));
        while head != tail {
            let [first, second] = unit.command(base, head);
            if watcher.is_some_and(|takes| !takes([first, second])) {
                return unit.set64(reg::STATUS, unit.get64(reg::STATUS) & !status::CMD_BUF_RUN);
            }
            let address = first & (entry::ADDRESS | 0xff8);
            if first ^ address == command::completion_wait(0, 0)[0] {
                unit.confirm(second as u32, address);
            }
            head = ring_index(ring_place(head + 1));
            unit.set64(reg::COMMAND_HEAD, ring_place(head));
        }
    }
}
