//! Pages of the kernel's ring buffers: any bytes are one. What is read of them is lines of text, of which each is an event, or a loss.

use portcullis_trace::parse::{Line, Lists, parse_line};
use portcullis_trace::ring::{Formats, Merge};

use crate::reached::note;

/// A page's head, as all kernels of 64 bits have it.
const HEADER: &str = "field: u64 timestamp; offset:0; size:8; signed:0;\n\
                      field: local_t commit; offset:8; size:8; signed:1;\n\
                      field: char data; offset:16; size:4080; signed:0;\n";

/// Events with fields of each kind.
const EVENTS: [(&str, &str); 3] = [
    (
        "dma",
        "name: dma_map_sg\nID: 1\nfield:int common_pid; offset:4; size:4; signed:1;\n\
         field:__data_loc char[] device; offset:8; size:4; signed:0;\nfield:int full_nents; offset:12; size:4; signed:1;\n\
         field:int full_ents; offset:16; size:4; signed:1;\nfield:bool truncated; offset:20; size:1; signed:0;\n\
         field:__data_loc u64[] phys_addrs; offset:24; size:4; signed:0;\nfield:__data_loc u64[] dma_addrs; offset:28; size:4; signed:0;\n\
         field:__data_loc unsigned int[] lengths; offset:32; size:4; signed:0;\n\
         field:enum dma_data_direction dir; offset:36; size:4; signed:0;\nfield:unsigned long attrs; offset:40; size:8; signed:0;\n",
    ),
    (
        "iommu",
        "name: map\nID: 2\nfield:u64 iova; offset:8; size:8; signed:0;\nfield:u64 paddr; offset:16; size:8; signed:0;\n\
         field:size_t size; offset:24; size:8; signed:0;\n",
    ),
    (
        "intel_iommu",
        "name: map_single\nID: 3\nfield:__rel_loc char[] dev_name; offset:8; size:4; signed:0;\n\
         field:u64 dev_addr; offset:16; size:8; signed:0;\nfield:u64 phys_addr; offset:24; size:8; signed:0;\n\
         field:size_t size; offset:32; size:8; signed:0;\n",
    ),
];

/// Reads `bytes` as pages of two CPUs, in two rounds.
pub fn run(bytes: &[u8]) {
    let mut formats = Formats::new(HEADER).expect("it is a page");
    for (system, text) in EVENTS {
        formats.add(system, text).expect("it is an event");
    }
    let mut merge = Merge::new(formats);
    let mut text = Vec::new();
    let (first, second) = bytes.split_at(bytes.len() / 2);
    merge.page(0, first);
    merge.round(&mut text);
    merge.page(1, second);
    merge.finish(&mut text);
    assert!(merge.events() <= bytes.len() as u64 / 4, "an event has four bytes at least");
    let (mut lists, mut events) = (Lists::default(), 0);
    for line in text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        note(String::from_utf8_lossy(line));
        match parse_line(1, line, &mut lists) {
            Ok(Line::Event(_)) => events += 1,
            Ok(Line::Lost(lost)) => assert!(lost > 0),
            // Fields that make no sense, of an event all the same.
            Err(error) => {
                assert!(error.is_event, "{error}");
                events += 1;
            }
            Ok(other) => panic!("{other:?}"),
        }
    }
    assert!(events <= merge.events());
}
