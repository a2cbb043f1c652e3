//! Values that are strings in YAML and numbers in use: durations, percentages, ratios, quantities, `auto` or a number.
//!
//! Each has a schema with a CEL rule, so that the API server refuses a bad value with a sentence instead of a pattern,
//! and a parser that the operator and the agent share.

use std::{borrow::Cow, fmt, str::FromStr, time::Duration};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// A value that the API server's rule would have refused: it came from an object stored before the rule, or from code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{value:?} is not {expected}")]
pub struct InvalidValue {
    /// The value as written.
    pub value: String,
    /// What would be accepted, e.g. `a duration such as 30s, 15m or 1h30m`.
    pub expected: &'static str,
}

macro_rules! string_scalar {
    ($(#[$doc:meta])* $name:ident, $max:literal, $rule:expr, $expected:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub String);

        impl $name {
            const EXPECTED: &'static str = $expected;

            fn invalid(&self) -> InvalidValue {
                InvalidValue { value: self.0.clone(), expected: Self::EXPECTED }
            }
        }

        impl From<&str> for $name {
            fn from(value: &str) -> Self {
                Self(value.to_owned())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({
                    "type": "string",
                    "maxLength": $max,
                    "x-kubernetes-validations": [{"rule": $rule, "message": concat!("use ", $expected)}],
                })
            }
        }
    };
}

string_scalar!(
    /// A positive duration in Go's notation with the units `ms`, `s`, `m` and `h`: `500ms`, `30s`, `15m`, `1h30m`.
    DurationString,
    24,
    "self.matches('^([0-9]+(\\\\.[0-9]+)?(ms|s|m|h))+$') && duration(self) > duration('0s') && duration(self) <= duration('720h')",
    "a duration such as 30s, 15m or 1h30m, above 0 and at most 720h"
);
string_scalar!(
    /// A share from 0% to 100%, such as `5%` or `99.5%`.
    Percent,
    12,
    "self.matches('^([0-9]{1,2}(\\\\.[0-9]{1,6})?|100(\\\\.0{1,6})?)%$')",
    "a percentage from 0% to 100%, such as 5% or 99.5%"
);
string_scalar!(
    /// A non-negative decimal number in quotes, such as `"0.95"`: CRDs avoid floating-point fields.
    Ratio,
    16,
    "self.matches('^[0-9]{1,6}(\\\\.[0-9]{1,8})?$')",
    "a decimal number in quotes, below a million and with at most eight decimals, such as \"0.95\""
);
string_scalar!(
    /// A Kubernetes quantity above zero, such as `500m`, `4` or `24Gi`.
    PositiveQuantity,
    32,
    "isQuantity(self) && quantity(self).isGreaterThan(quantity('0'))",
    "a Kubernetes quantity above zero, such as 500m, 4 or 24Gi"
);
string_scalar!(
    /// A SHA-256 digest: 64 lower-case hexadecimal digits.
    Sha256,
    64,
    "self.matches('^[0-9a-f]{64}$')",
    "the 64 lower-case hexadecimal digits that sha256sum prints"
);

impl DurationString {
    /// The duration as a number.
    ///
    /// # Errors
    /// When the text is not one, or is zero.
    pub fn to_std(&self) -> Result<Duration, InvalidValue> {
        match kube::core::Duration::from_str(&self.0) {
            Ok(value) if !value.is_negative() && Duration::from(value) > Duration::ZERO => Ok(value.into()),
            _ => Err(self.invalid()),
        }
    }
}

impl Percent {
    /// [`Self::parts`] of a whole.
    pub const WHOLE: u32 = 100_000_000;

    /// The share as a number from 0 to 1.
    ///
    /// # Errors
    /// When the text is not a percentage from 0% to 100%.
    pub fn ratio(&self) -> Result<f64, InvalidValue> {
        let value = self.0.strip_suffix('%').and_then(|number| number.parse::<f64>().ok()).map(|number| number / 100.0);
        value.filter(|ratio| (0.0..=1.0).contains(ratio)).ok_or_else(|| self.invalid())
    }

    /// The share in millionths of a percent, the least that can be told apart.
    ///
    /// # Errors
    /// As [`Self::ratio`].
    pub fn parts(&self) -> Result<u32, InvalidValue> {
        // A ratio is from 0 to 1.
        Ok((self.ratio()? * f64::from(Self::WHOLE)).round() as u32)
    }
}

impl Ratio {
    /// The number.
    ///
    /// # Errors
    /// When the text is not a finite, non-negative decimal number.
    pub fn value(&self) -> Result<f64, InvalidValue> {
        self.0.parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0).ok_or_else(|| self.invalid())
    }
}

impl PositiveQuantity {
    /// The quantity as a number: CPUs, or bytes.
    ///
    /// # Errors
    /// When the text is not a quantity above zero.
    pub fn value(&self) -> Result<f64, InvalidValue> {
        crate::quantity::parse(&self.0).filter(|value| *value > 0.0).ok_or_else(|| self.invalid())
    }

    /// Its whole bytes; `None` when there is not one, or it is no quantity.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        let value = self.value().ok()?;
        // The cast saturates; a limit of exabytes is none.
        (value >= 1.0).then_some(value as u64)
    }
}

impl Sha256 {
    /// The digest, when it has the right form.
    ///
    /// # Errors
    /// When it is not 64 lower-case hexadecimal digits.
    pub fn checked(&self) -> Result<&str, InvalidValue> {
        let form = self.0.len() == 64 && self.0.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        form.then_some(self.0.as_str()).ok_or_else(|| self.invalid())
    }
}

/// A number, or `auto`: Gantry chooses and reports what it chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum AutoOr {
    /// Gantry chooses.
    #[default]
    Auto,
    /// The user chose.
    Value(u32),
}

impl AutoOr {
    /// The user's number, if there is one.
    #[must_use]
    pub fn value(self) -> Option<u32> {
        match self {
            Self::Auto => None,
            Self::Value(value) => Some(value),
        }
    }
}

impl Serialize for AutoOr {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Value(value) => serializer.serialize_u32(*value),
        }
    }
}

impl<'de> Deserialize<'de> for AutoOr {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = AutoOr;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"auto\" or a whole number from 0 to 1024")
            }

            fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<AutoOr, E> {
                u32::try_from(value)
                    .map(AutoOr::Value)
                    .map_err(|_| E::invalid_value(serde::de::Unexpected::Unsigned(value), &self))
            }

            fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<AutoOr, E> {
                u32::try_from(value)
                    .map(AutoOr::Value)
                    .map_err(|_| E::invalid_value(serde::de::Unexpected::Signed(value), &self))
            }

            /// As a manifest with nothing behind the colon has it.
            fn visit_unit<E: serde::de::Error>(self) -> Result<AutoOr, E> {
                Ok(AutoOr::Auto)
            }

            fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<AutoOr, E> {
                match value {
                    "auto" => Ok(AutoOr::Auto),
                    other => Err(E::invalid_value(serde::de::Unexpected::Str(other), &self)),
                }
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl JsonSchema for AutoOr {
    fn schema_name() -> Cow<'static, str> {
        "AutoOr".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "x-kubernetes-int-or-string": true,
            // The API server puts the default in the place of a null that may not be, and leaves one that may unchecked.
            "nullable": false,
            "maxLength": 8,
            "x-kubernetes-validations": [{
                "rule": "type(self) == int ? (self >= 0 && self <= 1024) : self == 'auto'",
                "message": "use auto or a whole number from 0 to 1024",
            }],
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn durations_are_gos() {
        for (text, seconds) in [("30s", 30.0), ("1h30m", 5400.0), ("500ms", 0.5), ("1.5m", 90.0)] {
            assert_eq!(DurationString::from(text).to_std().unwrap(), Duration::from_secs_f64(seconds), "{text}");
        }
        for text in ["", "0s", "-5s", "5", "5 minutes"] {
            assert!(DurationString::from(text).to_std().is_err(), "{text}");
        }
    }

    #[test]
    fn percentages_are_shares() {
        for (text, ratio) in [("0%", 0.0), ("5%", 0.05), ("99.5%", 0.995), ("100%", 1.0)] {
            assert!((Percent::from(text).ratio().unwrap() - ratio).abs() < 1e-12, "{text}");
        }
        for text in ["", "5", "101%", "-1%", "NaN%"] {
            assert!(Percent::from(text).ratio().is_err(), "{text}");
        }
    }

    #[test]
    fn quantities_are_bytes() {
        for (text, wanted) in [
            ("1Ki", Some(1024)),
            ("1.5Gi", Some(3 << 29)),
            ("2e3", Some(2000)),
            ("5000m", Some(5)),
            ("x", None),
            ("0.1", None),
        ] {
            assert_eq!(PositiveQuantity::from(text).bytes(), wanted, "{text}");
        }
    }

    #[test]
    fn digests_are_lower_case_hex() {
        assert!(Sha256("a".repeat(64)).checked().is_ok());
        for text in ["a".repeat(63), "A".repeat(64), "g".repeat(64)] {
            assert!(Sha256(text).checked().is_err());
        }
    }

    #[test]
    fn auto_or_a_number_round_trips() {
        for (json, value) in [("\"auto\"", AutoOr::Auto), ("12", AutoOr::Value(12))] {
            assert_eq!(serde_json::from_str::<AutoOr>(json).unwrap(), value);
            assert_eq!(serde_json::to_string(&value).unwrap(), json);
        }
        assert_eq!(serde_json::from_str::<AutoOr>("null").unwrap(), AutoOr::Auto);
        for json in ["-1", "\"all\"", "1.5"] {
            assert!(serde_json::from_str::<AutoOr>(json).is_err(), "{json}");
        }
    }
}
