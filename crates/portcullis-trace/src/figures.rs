//! Human-readable figures.

/// A number with thousands separators: `65,535`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 map`, `2 maps`. For irregular plurals see [`number_of_these`].
pub fn number_of(n: u64, thing: &str) -> String {
    format!("{} {thing}{}", count(n), if n == 1 { "" } else { "s" })
}

/// `1 entry`, `2 entries`.
pub fn number_of_these(n: u64, one: &str, several: &str) -> String {
    format!("{} {}", count(n), if n == 1 { one } else { several })
}

/// Bytes with decimal units: `77 kB`.
pub fn bytes(bytes: f64) -> String {
    match bytes {
        _ if bytes < 1.0 => "< 1 byte".into(),
        _ if bytes < 999.5 => number_of(bytes.round() as u64, "byte"),
        _ if bytes < 999.5e3 => format!("{:.0} kB", bytes / 1e3),
        _ if bytes < 999.5e6 => format!("{:.1} MB", bytes / 1e6),
        _ if bytes < 999.5e9 => format!("{:.1} GB", bytes / 1e9),
        _ => format!("{} GB", count((bytes / 1e9).round() as u64)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_said_as_people_say_them() {
        assert_eq!(
            [0.4, 1.4, 512.0, 76_934.0, 999_499.0, 1_250_000.0, 67_108_864.0, 1e13].map(bytes),
            ["< 1 byte", "1 byte", "512 bytes", "77 kB", "999 kB", "1.2 MB", "67.1 MB", "10,000 GB"]
        );
        assert_eq!(
            [0, 7, 999, 1_000, 65_535, 1_234_567, u64::MAX].map(count),
            ["0", "7", "999", "1,000", "65,535", "1,234,567", "18,446,744,073,709,551,615"]
        );
        assert_eq!([0, 1, 2].map(|n| number_of(n, "map")), ["0 maps", "1 map", "2 maps"]);
        assert_eq!([1, 1_000].map(|n| number_of_these(n, "entry", "entries")), ["1 entry", "1,000 entries"]);
    }
}
