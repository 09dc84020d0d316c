//! Changes of the file's keys, as `reknit-simdriver set` takes them.

use super::{State, StateError};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::str::FromStr;

/// Whose keys are changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The GPU at this place in the file, from 0.
    Gpu(usize),
    /// Each GPU.
    All,
    /// The keys beside the list of GPUs.
    Node,
}

impl From<usize> for Target {
    fn from(gpu: usize) -> Self {
        Self::Gpu(gpu)
    }
}

impl FromStr for Target {
    type Err = StateError;

    fn from_str(text: &str) -> Result<Self, StateError> {
        match text {
            "all" => Ok(Self::All),
            "node" => Ok(Self::Node),
            number => match number.parse() {
                Ok(gpu) => Ok(Self::Gpu(gpu)),
                Err(_) => Err(StateError::NoTarget { text: text.to_owned() }),
            },
        }
    }
}

/// Keys of a GPU that stay as `init` made them: they say which GPU it is.
const GPU_FIXED: [&str; 2] = ["uuid", "pci_bus_id"];
/// Keys of the file that `set` does not change.
const NODE_FIXED: [&str; 3] = ["node", "gpus", "events"];
/// Short names for keys of `fabric`.
const FABRIC_KEYS: [(&str, &str); 2] =
    [("fabric_route_unhealthy", "route_unhealthy"), ("fabric_bandwidth_degraded", "bandwidth_degraded")];

impl State {
    /// Changes the target's keys as `KEY=VALUE` says. The value is JSON; a bare word is a string. On an
    /// error nothing is changed.
    pub fn set(&mut self, target: impl Into<Target>, assignments: &[String]) -> Result<(), StateError> {
        let mut changed = self.clone();
        match target.into() {
            Target::Gpu(gpu) => {
                let count = changed.gpus.len();
                let target = changed.gpus.get_mut(gpu).ok_or(StateError::NoSuchGpu { gpu, count })?;
                *target = assign(target, "a GPU", &GPU_FIXED, assignments)?;
            }
            Target::All => {
                for target in &mut changed.gpus {
                    *target = assign(target, "a GPU", &GPU_FIXED, assignments)?;
                }
            }
            Target::Node => changed = assign(&changed, "a node", &NODE_FIXED, assignments)?,
        }
        *self = changed;
        Ok(())
    }
}

fn assign<T: Clone + Serialize + DeserializeOwned>(
    to: &T,
    whose: &'static str,
    fixed: &[&str],
    assignments: &[String],
) -> Result<T, StateError> {
    assignments.iter().try_fold(to.clone(), |before, text| {
        let not_one = || StateError::NotAnAssignment { text: text.to_owned() };
        let (key, value) = text.split_once('=').ok_or_else(not_one)?;
        let word = with(&before, whose, fixed, key, Value::String(value.to_owned()));
        match serde_json::from_str(value) {
            // What reads as a number can be meant as a word: a serial number, a version.
            Ok(new) => with(&before, whose, fixed, key, new).or_else(|reason| word.map_err(|_| reason)),
            Err(_) => word,
        }
    })
}

fn with<T: Serialize + DeserializeOwned>(
    before: &T,
    whose: &'static str,
    fixed: &[&str],
    key: &str,
    new: Value,
) -> Result<T, StateError> {
    let value = new.to_string();
    let bad_value = |reason: serde_json::Error| StateError::BadValue {
        key: key.to_owned(),
        value,
        reason: reason.to_string(),
    };
    let mut fields = match serde_json::to_value(before) {
        Ok(Value::Object(fields)) => fields,
        Ok(_) => Map::new(),
        Err(reason) => return Err(bad_value(reason)),
    };
    let short = FABRIC_KEYS.iter().find(|(name, _)| *name == key);
    if let (Some((_, inner)), Some(fabric)) = (short, fields.get_mut("fabric")) {
        if fabric.is_null() {
            *fabric = json!({});
        }
        fabric[inner] = new;
    } else if fields.contains_key(key) && !fixed.contains(&key) {
        fields.insert(key.to_owned(), new);
    } else {
        let known = fields.keys().map(String::as_str).filter(|name| !fixed.contains(name));
        let known: Vec<&str> = known.collect();
        return Err(StateError::UnknownKey { key: key.to_owned(), whose, known: known.join(", ") });
    }
    serde_json::from_value(Value::Object(fields)).map_err(bad_value)
}
