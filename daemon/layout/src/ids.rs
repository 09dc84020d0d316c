//! Typed names for everything a plan speaks of.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub String);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.to_owned())
            }
        }
    };
}

number_id!(/// A data-parallel copy of the model.
    ReplicaId(u32));
number_id!(/// A pipeline stage.
    StageId(u32));
number_id!(/// A place in a tensor-parallel group.
    Slot(u32));
number_id!(/// The generation of a layout. Everything on the wire carries it; it never repeats and only grows.
    Epoch(u64));
number_id!(/// An optimizer step. `Step(k)` as a state means: `k` steps are committed.
    Step(u64));
number_id!(/// Which start of a worker on a GPU this is. It grows with every spawn of a job and is never reused.
    Incarnation(u64));
text_id!(/// A machine.
    NodeName);
text_id!(/// GPUs that share NVLink: a machine or a rack.
    DomainName);
text_id!(/// A GPU, by its UUID.
    GpuId);

/// One worker process: a GPU and which start on it. A new process on the same GPU is another worker.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WorkerKey {
    pub gpu: GpuId,
    pub incarnation: Incarnation,
}

impl fmt::Display for WorkerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.gpu, self.incarnation)
    }
}

/// A rank's place in the nominal layout: replica, stage, slot, written `r.s.t`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    pub replica: ReplicaId,
    pub stage: StageId,
    pub slot: Slot,
}

impl Place {
    pub const fn new(replica: u32, stage: u32, slot: u32) -> Self {
        Self { replica: ReplicaId(replica), stage: StageId(stage), slot: Slot(slot) }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.replica, self.stage, self.slot)
    }
}

/// A place was not written as `replica.stage.slot`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a place: write replica.stage.slot, such as 1.0.3")]
pub struct BadPlace(pub String);

impl FromStr for Place {
    type Err = BadPlace;

    fn from_str(text: &str) -> Result<Self, BadPlace> {
        let bad = || BadPlace(text.to_owned());
        let mut numbers = text.split('.').map(|part| part.parse::<u32>());
        let mut next = || numbers.next().and_then(Result::ok).ok_or_else(bad);
        let place = Self::new(next()?, next()?, next()?);
        if numbers.next().is_some() { Err(bad()) } else { Ok(place) }
    }
}

impl Serialize for Place {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Place {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A tensor axis that is split over slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Units are KV-head groups: one KV head with its query heads.
    Attn,
    /// Units are blocks of hidden columns.
    Ffn,
    /// Units are blocks of vocabulary rows. It has no layers.
    Vocab,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Attn => "attn",
            Self::Ffn => "ffn",
            Self::Vocab => "vocab",
        })
    }
}

/// A family at one layer: the thing that has one partition. `layer` is `None` for a family without layers.
///
/// Written `attn/3` or `vocab`, also as a key of JSON objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Axis {
    pub family: Family,
    pub layer: Option<u32>,
}

impl Axis {
    pub const fn attn(layer: u32) -> Self {
        Self { family: Family::Attn, layer: Some(layer) }
    }

    pub const fn ffn(layer: u32) -> Self {
        Self { family: Family::Ffn, layer: Some(layer) }
    }

    pub const fn vocab() -> Self {
        Self { family: Family::Vocab, layer: None }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            Some(layer) => write!(f, "{}/{layer}", self.family),
            None => self.family.fmt(f),
        }
    }
}

/// An axis was not written as `attn/LAYER`, `ffn/LAYER` or `vocab`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an axis: write attn/LAYER, ffn/LAYER or vocab")]
pub struct BadAxis(pub String);

impl FromStr for Axis {
    type Err = BadAxis;

    fn from_str(text: &str) -> Result<Self, BadAxis> {
        let bad = || BadAxis(text.to_owned());
        match text.split_once('/') {
            Some(("attn", layer)) => layer.parse().map(Self::attn).map_err(|_| bad()),
            Some(("ffn", layer)) => layer.parse().map(Self::ffn).map_err(|_| bad()),
            None if text == "vocab" => Ok(Self::vocab()),
            Some(_) | None => Err(bad()),
        }
    }
}

impl Serialize for Axis {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Axis {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
