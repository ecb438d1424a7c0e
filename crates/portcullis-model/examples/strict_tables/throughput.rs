//! From memory reads to throughput, and from throughput to losses.

use super::driver::PAGE;
use super::machine::Traffic;

/// The model of "Fast & Safe" (SOSP 2024): a page takes 65 ns, and 197 ns for each memory read of its walks.
const PAGE_NS: f64 = 65.0;
const READ_NS: f64 = 197.0;
/// The line, less its headers.
pub const LINE_GBPS: f64 = 98.0;

/// Gb/s at this number of reads for each page.
pub fn gbps(reads: f64) -> f64 {
    (PAGE * 8) as f64 / (PAGE_NS + reads * READ_NS)
}

/// The share of pages that are acknowledged individually because an earlier one is missing.
///
/// Senders speed up to the line's speed. If less gets through the rest is lost, and the streams slow down until the losses fit. By Mathis
/// et al. (1997) a stream with losses p has a window of sqrt(1.5 / p) packets. After each loss about a window of packets is out of order,
/// and a receiver acknowledges each of those at once (RFC 5681): p x sqrt(1.5 / p), that is 1.5 over the window. The window is a stream's
/// throughput times its round trip.
pub fn out_of_order(traffic: Traffic, reads: f64) -> f64 {
    let (flows, round_trip_us) = match traffic {
        Traffic::Streams { flows, round_trip_us } => (flows, round_trip_us),
        Traffic::Forced { percent } => return f64::from(percent) / 100.0,
        // A sender that waits for answers does not overrun the card.
        Traffic::Requests => return 0.0,
    };
    let gbps = gbps(reads);
    if gbps >= LINE_GBPS {
        return 0.0;
    }
    let window = gbps * f64::from(round_trip_us) * 1000.0 / (PAGE * 8) as f64 / flows as f64;
    (1.5 / window).min(1.0)
}
