//! Enums of a status that may hold what a later release writes.
//!
//! Operator, agents and the installed CRD are updated one after the other, and each must go on reading what the others
//! write: a value that is not known is kept as it was written, and written as it was read. So these enums are plain
//! strings in the schema. They stay `Copy`: unknown texts are kept once for the process, and only so many of them.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

/// Texts of unknown values that a process keeps; all further ones become [`OTHER`].
const KEPT_MAX: usize = 256;
/// Bytes of an unknown value that is kept; a longer one becomes [`OTHER`].
const KEPT_BYTES_MAX: usize = 64;
/// What stands for a value that is not kept.
pub(crate) const OTHER: &str = "Unknown";

/// The text, kept for as long as the process lives.
pub(crate) fn keep(text: &str) -> &'static str {
    static KEPT: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    keep_in(&mut KEPT.lock().unwrap_or_else(PoisonError::into_inner), text)
}

fn keep_in(kept: &mut BTreeSet<&'static str>, text: &str) -> &'static str {
    if let Some(known) = kept.get(text) {
        return known;
    }
    if text.len() > KEPT_BYTES_MAX || kept.len() >= KEPT_MAX {
        return OTHER;
    }
    let text: &'static str = Box::leak(text.into());
    kept.insert(text);
    text
}

/// An enum whose values are their names, and that keeps names it does not know.
macro_rules! open_enum {
    ($(#[doc = $doc:literal])+ $name:ident { $($(#[doc = $variant_doc:literal])+ $variant:ident),+ $(,)? }) => {
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name {
            $($(#[doc = $variant_doc])+ $variant,)+
            /// What another release calls so.
            Unknown(&'static str),
        }

        impl $name {
            /// All that this release knows.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The name as it stands in YAML.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => stringify!($variant),)+
                    Self::Unknown(text) => text,
                }
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <std::borrow::Cow<'de, str> as serde::Deserialize>::deserialize(deserializer)?;
                Ok(match text.as_ref() {
                    $(stringify!($variant) => Self::$variant,)+
                    other => Self::Unknown($crate::open::keep(other)),
                })
            }
        }

        impl schemars::JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({"type": "string", "description": concat!($($doc, "\n"),+).trim()})
            }
        }
    };
}
pub(crate) use open_enum;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;
    use crate::status::{GateName, ReplicaHealth};

    #[test]
    fn what_another_release_knows_is_kept_as_it_was_written() {
        let names = json!(["Memory", "Toxicity", "Toxicity", "memory"]);
        let read: Vec<GateName> = serde_json::from_value(names.clone()).unwrap();
        assert_eq!(
            read,
            [
                GateName::Memory,
                GateName::Unknown("Toxicity"),
                GateName::Unknown("Toxicity"),
                GateName::Unknown("memory")
            ]
        );
        assert_eq!(serde_json::to_value(&read).unwrap(), names);
        assert!(serde_json::from_value::<ReplicaHealth>(json!(7)).is_err(), "no name at all");
        assert!(!GateName::ALL.iter().any(|gate| matches!(gate, GateName::Unknown(_))));
    }

    #[test]
    fn texts_without_end_cost_no_memory_without_end() {
        let mut table = BTreeSet::new();
        assert_eq!(keep_in(&mut table, &"x".repeat(KEPT_BYTES_MAX + 1)), OTHER);
        let kept: BTreeSet<_> = (0..2 * KEPT_MAX).map(|n| keep_in(&mut table, &format!("text-{n}"))).collect();
        assert!(kept.len() == KEPT_MAX + 1 && kept.contains(OTHER), "{}", kept.len());
        assert_eq!(keep_in(&mut table, "text-0"), "text-0", "what is kept stays so");
    }
}
