//! Checked parsing of numbers.

/// The decimal number at the beginning of `text`, and the rest; `None` if there is none or it exceeds 64 bits.
pub(super) fn leading_decimal(text: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0u64;
    let mut digits = 0;
    for &b in text {
        let digit = b.wrapping_sub(b'0');
        if digit > 9 {
            break;
        }
        value = value.checked_mul(10)?.checked_add(u64::from(digit))?;
        digits += 1;
    }
    if digits == 0 { None } else { Some((value, text.get(digits..)?)) }
}

/// The value of one hexadecimal digit.
fn hex_digit(b: u8) -> Option<u64> {
    match b {
        b'0'..=b'9' => Some(u64::from(b - b'0')),
        b'a'..=b'f' => Some(u64::from(b - b'a' + 10)),
        b'A'..=b'F' => Some(u64::from(b - b'A' + 10)),
        _ => None,
    }
}

/// The hexadecimal number at the beginning of `text`, with `0x` or without, and the rest.
pub(super) fn leading_hex(text: &[u8]) -> Option<(u64, &[u8])> {
    let text = text.strip_prefix(b"0x").unwrap_or(text);
    let mut value = 0u64;
    let mut digits = 0;
    for &b in text {
        let Some(digit) = hex_digit(b) else { break };
        if value >> 60 != 0 {
            return None;
        }
        value = value << 4 | digit;
        digits += 1;
    }
    if digits == 0 { None } else { Some((value, text.get(digits..)?)) }
}

pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    leading_decimal(text).filter(|(_, rest)| rest.is_empty()).map(|(value, _)| value)
}

/// All of `text` as a hexadecimal number.
pub(super) fn hex(text: &[u8]) -> Option<u64> {
    leading_hex(text).filter(|(_, rest)| rest.is_empty()).map(|(value, _)| value)
}

/// Seconds with up to nine decimals, in nanoseconds.
pub(super) fn seconds(text: &[u8]) -> Option<u64> {
    let (whole, rest) = leading_decimal(text)?;
    let nanos = match rest {
        [] => 0,
        [b'.', decimals @ ..] if decimals.len() <= 9 => {
            let mut value = if decimals.is_empty() { 0 } else { decimal(decimals)? };
            for _ in decimals.len()..9 {
                value *= 10;
            }
            value
        }
        _ => return None,
    };
    whole.checked_mul(1_000_000_000)?.checked_add(nanos)
}
