//! Kubernetes quantities as numbers, and bytes for people.
//!
//! The API server writes a quantity in its canonical form (`0.5` becomes `500m`), so two texts are compared by value.

/// The value of a quantity such as `500m`, `4` or `24Gi`; `None` when it is not one.
#[must_use]
pub fn parse(text: &str) -> Option<f64> {
    let number_end = text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '+' | '-'))).unwrap_or(text.len());
    let (number, suffix) = text.split_at(number_end);
    let number: f64 = number.parse().ok()?;
    let factor = match suffix {
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "" => 1.0,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => 1024f64.powi(2),
        "Gi" => 1024f64.powi(3),
        "Ti" => 1024f64.powi(4),
        "Pi" => 1024f64.powi(5),
        "Ei" => 1024f64.powi(6),
        exponent => {
            let exponent = exponent.strip_prefix(['e', 'E'])?;
            10f64.powi(exponent.parse::<i32>().ok().filter(|exponent| exponent.abs() <= 30)?)
        }
    };
    let value = number * factor;
    value.is_finite().then_some(value)
}

/// Whether two texts mean the same quantity.
#[must_use]
pub fn same(a: &str, b: &str) -> bool {
    a == b || matches!((parse(a), parse(b)), (Some(a), Some(b)) if (a - b).abs() <= a.abs() * 1e-12)
}

/// The quantity in the spelling that all spellings of it share: whole numbers of the largest unit, of bytes where that is one
/// of theirs, and thousandths. A text that is none stays as it is.
#[must_use]
pub fn canonical(text: &str) -> String {
    const UNITS: [(&str, i128); 12] = [
        ("Ei", 1 << 60),
        ("Pi", 1 << 50),
        ("Ti", 1 << 40),
        ("Gi", 1 << 30),
        ("Mi", 1 << 20),
        ("Ki", 1 << 10),
        ("E", 1_000_000_000_000_000_000),
        ("P", 1_000_000_000_000_000),
        ("T", 1_000_000_000_000),
        ("G", 1_000_000_000),
        ("M", 1_000_000),
        ("k", 1000),
    ];
    let Some(value) = parse(text).filter(|value| value.abs() < 1e30) else { return text.to_owned() };
    let whole = |value: f64| {
        let rounded = value.round();
        ((value - rounded).abs() <= value.abs() * 1e-12).then_some(rounded as i128)
    };
    match whole(value) {
        Some(number) => {
            let unit = UNITS.into_iter().find(|(_, size)| number != 0 && number % size == 0);
            unit.map_or_else(|| number.to_string(), |(unit, size)| format!("{}{unit}", number / size))
        }
        None => whole(value * 1e3).map_or_else(|| text.to_owned(), |thousandths| format!("{thousandths}m")),
    }
}

/// Bytes for people, e.g. `512Mi` or `16.7Gi`.
#[must_use]
pub fn human_bytes(bytes: i64) -> String {
    const UNITS: [(&str, i64); 3] = [("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)];
    for (unit, size) in UNITS {
        if bytes >= size {
            let tenths = i128::from(bytes) * 10 / i128::from(size);
            return match (tenths / 10, tenths % 10) {
                (whole, 0) => format!("{whole}{unit}"),
                (whole, _) if whole >= 100 => format!("{whole}{unit}"),
                (whole, tenth) => format!("{whole}.{tenth}{unit}"),
            };
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn quantities_are_compared_by_value() {
        for (a, b) in [("0.5", "500m"), ("1Gi", "1024Mi"), ("2e3", "2k"), ("1", "1000m"), ("128974848", "123Mi")] {
            assert!(same(a, b), "{a} {b}");
        }
        for (a, b) in [("1G", "1Gi"), ("1", "2"), ("x", "1"), ("1", "x")] {
            assert!(!same(a, b), "{a} {b}");
        }
        for text in ["", "Gi", "1x", "1e", "1e400", "--1"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn bytes_are_short() {
        for (bytes, text) in [(512, "512"), (1 << 20, "1Mi"), (512 << 20, "512Mi"), (17_931_591_024, "16.7Gi")] {
            assert_eq!(human_bytes(bytes), text);
        }
    }
}
