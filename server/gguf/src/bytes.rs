//! Amounts as people read them.

/// Bytes in binary units with three significant digits: "3.79 MiB", "12.0 GiB".
#[must_use]
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    scaled(bytes, 1024, &UNITS, " ")
}

/// A count in decimal units with three significant digits: "3.67M", "8.03B".
#[must_use]
pub fn human_count(count: u64) -> String {
    const UNITS: [&str; 4] = ["K", "M", "B", "T"];
    if count < 1000 {
        return count.to_string();
    }
    scaled(count, 1000, &UNITS, "")
}

fn scaled(amount: u64, base: u64, units: &[&str], gap: &str) -> String {
    let mut unit = 0;
    let mut one = base;
    // Go on while three digits before the point would round up to the next unit.
    while unit + 1 < units.len() && amount >= one.saturating_mul(base).saturating_sub(one / 2) {
        one = one.saturating_mul(base);
        unit += 1;
    }
    // Two decimals are all that is shown, so that the mantissa's 53 bits are more than enough.
    let value = amount as f64 / one as f64;
    let decimals = if value < 9.995 {
        2
    } else if value < 99.95 {
        1
    } else {
        0
    };
    format!("{value:.decimals$}{gap}{}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_counts_read_well_at_every_edge() {
        let bytes = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (10_230, "9.99 KiB"),
            (10_240, "10.0 KiB"),
            (1024 * 1024 - 1, "1.00 MiB"),
            (3_973_664, "3.79 MiB"),
            (5 << 30, "5.00 GiB"),
            (u64::MAX, "16.0 EiB"),
        ];
        for (amount, text) in bytes {
            assert_eq!(human_bytes(amount), text);
        }
        let counts =
            [(999, "999"), (1000, "1.00K"), (3_672_320, "3.67M"), (8_030_261_248, "8.03B"), (999_999, "1.00M")];
        for (amount, text) in counts {
            assert_eq!(human_count(amount), text);
        }
    }
}
