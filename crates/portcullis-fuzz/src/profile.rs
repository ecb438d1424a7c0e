//! Hardware profiles: any text is one, or an error that can be printed; what is one can be used.

use portcullis_trace::printable::is_plain;
use portcullis_trace::replay::{Mode, Options, Profile, replay};
use portcullis_trace::{ReadOptions, Trace};

use crate::budget;

/// A mapping, and its end.
const TRACE: &str = "\
t-1 [000] 1.5: dma_map_page: d dir=TO_DEVICE dma_addr=f000 size=512 phys_addr=1000 attrs=
t-1 [000] 1.6: dma_unmap_page: d dir=TO_DEVICE dma_addr=f000 size=512 attrs=
";

/// Reads `bytes` as a profile.
pub fn run(bytes: &[u8]) {
    budget::keep();
    let Ok(text) = str::from_utf8(bytes) else { return };
    match Profile::parse("fuzz", text) {
        Ok(profile) => {
            let costs = profile.waits.costs();
            assert!(costs.submission_ns <= 2_000_000_000 && costs.request_ns <= 1_000_000_000);
            assert!(profile.caches.iotlb_ways <= profile.caches.iotlb_entries);
            // One in some: a replay takes milliseconds before it begins.
            if bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)) & 63 == 0 {
                replayed(profile);
            }
        }
        Err(error) => {
            let said = error.to_string();
            assert!(!said.is_empty() && said.chars().all(|c| is_plain(c) || c == '\n'), "{said:?}");
        }
    }
}

/// What was accepted can be replayed with.
fn replayed(profile: Profile) {
    let mut trace =
        Trace::from_bytes("fuzz", TRACE.as_bytes(), ReadOptions::default()).expect("it is memory");
    let options = Options { policies: vec![Mode::StrictRing], ..Options::new(profile) };
    if let Ok(report) = replay(&mut trace, &options, |_| ()) {
        assert_eq!((report.policies[0].operations, report.policies[0].violations), (1, 0));
    }
}
