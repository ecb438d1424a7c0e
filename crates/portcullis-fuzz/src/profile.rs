//! Hardware profiles: any text is one, or an error that can be printed; what is one can be used.

use portcullis_trace::replay::Profile;

/// Reads `bytes` as a profile.
pub fn run(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    match Profile::parse("fuzz", text) {
        Ok(profile) => {
            let costs = profile.waits.costs();
            assert!(costs.submission_ns <= 2_000_000_000 && costs.request_ns <= 1_000_000_000);
            assert!(profile.caches.iotlb_ways <= profile.caches.iotlb_entries);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
