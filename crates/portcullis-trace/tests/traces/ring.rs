//! Pages of ring buffers: the recorded events equal the kernel's text; other page contents are skipped.

use portcullis_trace::parse::{Line, Lists, parse_line};
use portcullis_trace::ring::{Entry, Formats, Merge};

const HEADER: &str = "\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;\n\
                      \tfield: local_t commit;\toffset:8;\tsize:8;\tsigned:1;\n\
                      \tfield: char data;\toffset:16;\tsize:4080;\tsigned:0;\n";

/// `iommu:unmap`, with a number and a field.
const UNMAP: &str = "name: unmap\nID: 7\nformat:\n\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
                     \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
                     \tfield:u64 iova;\toffset:8;\tsize:8;\tsigned:0;\n";

fn formats() -> Formats {
    let mut formats = Formats::new(HEADER).unwrap();
    formats.add("iommu", UNMAP).unwrap();
    formats
}

/// An event's bytes: its number, its process, an address.
fn event(iova: u64) -> Vec<u8> {
    [&7_u16.to_ne_bytes()[..], &[0; 2], &5_u32.to_ne_bytes(), &iova.to_ne_bytes()].concat()
}

/// An entry: type, time since the previous one, and the rest.
fn entry(kind: u32, since: u32, rest: &[u8]) -> Vec<u8> {
    [&(kind | since << 5).to_ne_bytes()[..], rest].concat()
}

fn page(time_ns: u64, flags: u64, entries: &[Vec<u8>]) -> Vec<u8> {
    let data = entries.concat();
    [&time_ns.to_ne_bytes()[..], &(data.len() as u64 | flags).to_ne_bytes(), &data].concat()
}

/// The times and addresses of the events of a page.
fn times(page: &[u8]) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    formats().events(page, |Entry { time_ns, data }| {
        found.push((time_ns, u64::from_ne_bytes(data[8..16].try_into().unwrap())));
    });
    found
}

#[test]
fn times_count_from_the_page_s_and_from_each_other() {
    const PADDING: u32 = 29;
    const EXTEND: u32 = 30;
    const STAMP: u32 = 31;
    let long = |iova| [&20_u32.to_ne_bytes()[..], &event(iova)].concat();
    let page = page(
        1_000,
        0,
        &[
            entry(4, 5, &event(1)),
            // One whose length follows its header.
            entry(0, 6, &long(2)),
            // 2^27 nanoseconds and 3 more.
            entry(EXTEND, 3, &1_u32.to_ne_bytes()),
            entry(4, 1, &event(3)),
            // Discarded: its own time counts, except the one for none.
            entry(PADDING, 10, &[&8_u32.to_ne_bytes()[..], &[0xff; 4]].concat()),
            entry(PADDING, 1, &4_u32.to_ne_bytes()),
            entry(4, 2, &event(4)),
            entry(STAMP, 9, &4_u32.to_ne_bytes()),
            entry(4, 0, &event(5)),
            entry(PADDING, 0, &[]),
            entry(4, 0, &event(6)),
        ],
    );
    let extended = 1_011 + (1 << 27) + 3;
    let expected = [(1_005, 1), (1_011, 2), (extended + 1, 3), (extended + 13, 4), (4 << 27 | 9, 5)];
    assert_eq!(times(&page), expected);
}

#[test]
fn losses_are_counted_as_the_kernel_counts_them() {
    const MISSED: u64 = 1 << 31;
    const STORED: u64 = 1 << 30;
    let formats = formats();
    let of = |flags, behind: &[u8]| {
        let page = [page(0, flags, &[entry(4, 0, &event(1))]), behind.to_vec()].concat();
        let read = formats.events(&page, |_| ());
        assert_eq!((read.events, read.damaged, read.lost), (1, false, formats.lost_before(&page)));
        read.lost
    };
    let stored = 12_u64.to_ne_bytes();
    assert_eq!([of(0, &stored), of(MISSED, &stored), of(MISSED | STORED, &stored)], [0, 1, 12]);
    assert_eq!(of(MISSED | STORED, &0_u64.to_ne_bytes()), 1);
    assert_eq!(of(MISSED | STORED, &[]), 1, "a number that is not there");
    // A recorder's copy of a page has the number.
    let page = [page(0, MISSED | STORED, &[entry(4, 0, &event(1))]), stored.to_vec(), vec![0; 9]].concat();
    assert_eq!(formats.used(&page).len(), page.len() - 9);
    assert_eq!(formats.lost_before(formats.used(&page)), 12);
}

/// Whatever follows a page's events, such as the number of lost ones.
#[test]
fn a_page_is_empty_where_its_head_says_so() {
    let formats = formats();
    let stored = 12_u64.to_ne_bytes();
    for flags in [0, 1 << 31, 3 << 30] {
        assert!(formats.is_empty(&[page(0, flags, &[]), stored.to_vec()].concat()), "{flags:x}");
        assert!(
            !formats.is_empty(&[page(0, flags, &[entry(4, 0, &event(1))]), stored.to_vec()].concat()),
            "{flags:x}"
        );
    }
    assert!(formats.is_empty(&page(0, 0, &[entry(4, 0, &event(1))])[..15]), "a head that is cut");
}

/// A page is damaged if its header, its events or an event's length exceed it; everything before is read.
#[test]
fn a_page_that_ends_too_early_is_damaged() {
    let whole = page(9, 0, &[entry(4, 1, &event(1)), entry(4, 1, &event(2))]);
    let read = |page: &[u8]| {
        let read = formats().events(page, |_| ());
        (read.events, read.damaged)
    };
    assert_eq!(read(&whole), (2, false));
    for end in 0..whole.len() {
        assert_eq!(read(&whole[..end]), (0, true), "{end} bytes");
    }
    let mut long = whole;
    long[36] = 28;
    assert_eq!(read(&long), (1, true));
}

fn merged(rounds: &[&[(u32, Vec<u8>)]]) -> Vec<String> {
    let mut merge = Merge::new(formats());
    let mut out = Vec::new();
    let mut all = Vec::new();
    for round in rounds {
        round.iter().for_each(|(cpu, page)| merge.page(*cpu, page));
        merge.round(&mut out);
        all.push(String::from_utf8(std::mem::take(&mut out)).unwrap());
    }
    merge.finish(&mut out);
    all.push(String::from_utf8(out).unwrap());
    all
}

#[test]
fn cpus_are_put_in_the_order_of_time_a_round_later() {
    let at = |time_ns, iova| page(time_ns, 0, &[entry(4, 0, &event(iova))]);
    let line = |cpu, ns: u64, iova: u64| {
        format!("<...>-5 [{cpu:03}] 0.{ns:09}: unmap: IOMMU: iova={iova:#018x} - {iova:#018x}\n")
    };
    let rounds = merged(&[
        // The first CPU was read before the second, which had a later event.
        &[(0, at(10, 1)), (1, at(50, 2))],
        &[(0, at(30, 3)), (0, at(60, 4)), (1, at(70, 5))],
        &[],
    ]);
    let second = [line(0, 10, 1), line(0, 30, 3), line(1, 50, 2)].concat();
    let third = [line(0, 60, 4), line(1, 70, 5)].concat();
    assert_eq!(rounds, [String::new(), second, third, String::new()]);
}

#[test]
fn a_loss_stands_before_the_page_and_damage_behind_it() {
    let lost = page(9, 1 << 31, &[entry(4, 1, &event(1)), entry(4, 1, &event(2))]);
    let mut cut = page(20, 0, &[entry(4, 0, &event(3)), entry(4, 0, &event(4))]);
    // Its second event claims to extend beyond the page's end.
    cut[36] = 28;
    let text = merged(&[&[(1, lost), (1, cut)]]).concat();
    let what =
        text.lines().map(|line| line.split(": ").nth(2).unwrap_or(line).to_owned()).collect::<Vec<_>>();
    let iova = |iova: u64| format!("iova={iova:#018x} - {iova:#018x}");
    let first = text.lines().next().unwrap();
    assert_eq!(first, "CPU:1 [LOST 1 EVENTS]");
    assert_eq!(what.len(), 5, "{text}");
    assert!(text.contains(&iova(2)) && text.contains(&iova(3)) && !text.contains(&iova(4)), "{text}");
    assert_eq!(text.lines().last(), Some("CPU:1 [LOST 1 EVENTS]"));
}

/// A recording of a guest with Linux 6.12: the same events as the pages of its CPUs and as the kernel's text.
const CPUS: [&[u8]; 2] = [include_bytes!("../ring/6.12/cpu0"), include_bytes!("../ring/6.12/cpu1")];
const TEXT: &[u8] = include_bytes!("../ring/6.12/trace.txt");

/// That kernel's descriptions of its events: a line `== SYSTEM` before each.
fn described() -> Formats {
    let mut formats = Formats::new(include_str!("../ring/6.12/header_page")).unwrap();
    for part in include_str!("../ring/6.12/formats").split("== ").skip(1) {
        let (system, format) = part.split_once('\n').unwrap();
        formats.add(system, format).unwrap();
    }
    formats
}

/// The event lines of a text: CPU, microseconds, rounded as the kernel does, and the rest.
fn events(text: &[u8]) -> Vec<String> {
    let mut lists = Lists::default();
    let lines = text.split(|&byte| byte == b'\n').enumerate();
    let read = lines.filter_map(|(at, line)| match parse_line(at as u64, line, &mut lists) {
        Ok(Line::Event(event)) => {
            Some(format!("{} {} {:?}", event.cpu, (event.time_ns + 500) / 1_000, event.kind))
        }
        Ok(_) => None,
        Err(error) => panic!("{error}"),
    });
    read.collect()
}

#[test]
fn a_kernel_s_pages_say_what_its_text_says() {
    let mut merge = Merge::new(described());
    for (cpu, pages) in (0..).zip(CPUS) {
        pages.chunks(4096).for_each(|page| merge.page(cpu, page));
    }
    let mut out = Vec::new();
    merge.finish(&mut out);
    let (mut ours, mut kernels) = (events(&out), events(TEXT));
    assert!(kernels.len() > 100, "{} events", kernels.len());
    assert_eq!((merge.lost(), merge.events()), (0, kernels.len() as u64));
    // Events of one microsecond may be in another order.
    ours.sort();
    kernels.sort();
    for (ours, kernels) in ours.iter().zip(&kernels) {
        assert_eq!(ours, kernels);
    }
}

#[test]
fn a_page_may_be_cut_anywhere_and_any_byte_may_be_another() {
    let formats = described();
    let page = CPUS[0].chunks(4096).next().unwrap();
    let whole = formats.events(page, |_| ()).events;
    let lines = |page: &[u8]| {
        let mut merge = Merge::new(formats.clone());
        merge.page(0, page);
        let mut out = Vec::new();
        merge.finish(&mut out);
        assert!(events(&out).len() as u64 <= merge.events());
        merge.events()
    };
    assert_eq!(lines(page), whole);
    for end in 0..page.len() {
        assert!(lines(&page[..end]) <= whole);
    }
    for at in (0..page.len()).step_by(3) {
        for byte in [0, 0x1f, 0x80, 0xff] {
            let mut page = page.to_vec();
            page[at] = byte;
            formats.events(&page, |entry| {
                formats.write_line(0, entry, &mut Vec::new());
            });
        }
    }
}

#[test]
fn what_is_passed_over_is_a_loss_and_time_goes_on_without_events() {
    let mut merge = Merge::new(formats());
    let mut out = Vec::new();
    merge.page(0, &page(50, 0, &[entry(4, 0, &event(1))]));
    merge.skip(0);
    merge.skip(7);
    merge.tick(60);
    merge.round(&mut out);
    assert!(out.is_empty());
    merge.tick(70);
    merge.round(&mut out);
    let text = String::from_utf8(out).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[1..], ["CPU:0 [LOST 7 EVENTS]", "<...>-0 [8191] 0.000000060: tick:"], "{text}");
    assert_eq!((merge.events(), merge.lost()), (1, 7));
}

/// The line of an event of `system`, from its name on.
fn line(system: &str, format: &str, data: &[u8]) -> String {
    let mut formats = Formats::new(HEADER).unwrap();
    formats.add(system, format).unwrap();
    let mut out = Vec::new();
    assert!(formats.write_line(0, Entry { time_ns: 0, data }, &mut out));
    String::from_utf8(out).unwrap().split_once("0.000000000: ").unwrap().1.to_owned()
}

#[test]
fn fields_that_this_guest_has_not_recorded_are_read() {
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
    // A location that counts from behind its own field, and the end of a name.
    let vtd = "name: map_single\nID: 7\n\tfield:__rel_loc char[] dev_name;\toffset:8;\tsize:4;\tsigned:0;\n\
               \tfield:size_t size;\toffset:16;\tsize:8;\tsigned:0;\n";
    let data = [words(&[7, 0, 12 | 4 << 16, 0, 4096, 0]), b"d\n2\0".to_vec()].concat();
    assert_eq!(line("intel_iommu", vtd, &data), "map_single: dev=d?2 size=4096\n");
    // An allocation that failed, and a direction that the kernel has not written.
    let alloc = "name: dma_alloc\nID: 7\n\tfield:__data_loc char[] device;\toffset:8;\tsize:4;\tsigned:0;\n\
                 \tfield:void * virt_addr;\toffset:16;\tsize:8;\tsigned:0;\n\tfield:enum dma_data_direction dir;\toffset:12;\tsize:4;\tsigned:0;\n";
    let of = |virt_addr| [words(&[7, 0, 24 | 2 << 16, 77, virt_addr, 0]), b"d\0".to_vec()].concat();
    assert_eq!(line("dma", alloc, &of(0)), "dma_alloc: d dir=0x4d virt_addr=0\n");
    assert_eq!(line("dma", alloc, &of(5)), "dma_alloc: d dir=0x4d\n", "a kernel's address is private");
    // A truncated list, attributes without a name, and a name outside the event.
    let list = "name: dma_map_sg\nID: 7\n\tfield:__data_loc char[] device;\toffset:8;\tsize:4;\tsigned:0;\n\
                \tfield:int full_nents;\toffset:12;\tsize:4;\tsigned:1;\n\tfield:bool truncated;\toffset:16;\tsize:1;\tsigned:0;\n\
                \tfield:unsigned long attrs;\toffset:24;\tsize:8;\tsigned:0;\n";
    let data = words(&[7, 0, 999 | 2 << 16, 200, 1, 0, 1 << 8 | 1 << 20, 0]);
    assert_eq!(line("dma", list, &data), "dma_map_sg: nents=128/200 [TRUNCATED] attrs=NO_WARN|0x100000\n");
    assert!(!formats().write_line(0, Entry { time_ns: 0, data: &words(&[8]) }, &mut Vec::new()));
}

#[test]
fn time_does_not_run_back_on_a_cpu() {
    let at = |time_ns, iova| page(time_ns, 0, &[entry(4, 0, &event(iova))]);
    let text = merged(&[&[(0, at(50, 1)), (0, at(40, 2))]]).concat();
    let times: Vec<&str> = text.lines().map(|line| line.split(' ').nth(2).unwrap()).collect();
    assert_eq!(times, ["0.000000050:", "0.000000050:"]);
}
