//! Measurements on hardware ("Fast & Safe", SOSP 2024), for comparison. Nothing is computed from them.

/// Misses for each page of 4 KiB, and Gb/s.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    pub iotlb: f64,
    /// The highest table first; `None` if the paper does not say.
    pub levels: [Option<f64>; 3],
    pub gbps: f64,
}

const fn full(iotlb: f64, [l1, l2, l3]: [f64; 3], gbps: f64) -> Measured {
    Measured { iotlb, levels: [Some(l1), Some(l2), Some(l3)], gbps }
}

const fn lowest(iotlb: f64, l3: f64, gbps: f64) -> Measured {
    Measured { iotlb, levels: [None, None, Some(l3)], gbps }
}

const fn answers(iotlb: f64, l1: f64, l3: f64, gbps: f64) -> Measured {
    Measured { iotlb, levels: [Some(l1), None, Some(l3)], gbps }
}

/// Streams on 5 cores: how many, with Linux's strict mode, and with the paper's.
pub const STREAMS: [(usize, Measured, Measured); 4] = [
    (5, full(1.30, [0.05, 0.05, 0.36], 78.0), lowest(1.27, 0.018, 98.0)),
    (10, full(1.43, [0.16, 0.15, 0.56], 62.0), lowest(1.2, 0.034, 92.0)),
    (20, full(1.96, [0.43, 0.42, 0.76], 40.0), lowest(1.2, 0.045, 88.0)),
    (40, full(2.20, [0.63, 0.63, 0.90], 31.0), lowest(1.2, 0.045, 85.0)),
];

/// Redis with values of 8 KiB: Linux; the caches kept; contiguous and batched; all three.
pub const ABLATION: [Measured; 4] = [
    answers(1.5, 0.13, 0.63, 40.0),
    answers(2.0, 0.0, 0.68, 46.0),
    answers(1.63, 0.15, 0.10, 74.0),
    answers(1.5, 0.0, 0.04, 97.0),
];
