//! A GPU as the command line names it.

use reknit_layout::{GpuId, Place};
use std::fmt;
use std::str::FromStr;

/// By the place where it sits, or by its own name, whether it has a place or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    Place(Place),
    Gpu(GpuId),
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadTarget {
    #[error(
        "`{0}` is not a place: write replica.stage.slot, such as 1.0.3, or the name of a GPU, such as n0/3"
    )]
    Neither(String),
    #[error("`{0}` is more than one: repeat the option for each GPU")]
    Several(String),
}

impl FromStr for Target {
    type Err = BadTarget;

    fn from_str(text: &str) -> Result<Self, BadTarget> {
        if text.contains([',', ' ']) {
            return Err(BadTarget::Several(text.to_owned()));
        }
        match text.rsplit_once('/') {
            Some((node, index)) if !node.is_empty() && !index.is_empty() => Ok(Self::Gpu(text.into())),
            Some(_) => Err(BadTarget::Neither(text.to_owned())),
            None => text.parse().map(Self::Place).map_err(|_| BadTarget::Neither(text.to_owned())),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Place(place) => place.fmt(f),
            Self::Gpu(gpu) => gpu.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_and_names() {
        assert_eq!("1.0.3".parse(), Ok(Target::Place(Place::new(1, 0, 3))));
        assert_eq!("n0/3".parse(), Ok(Target::Gpu("n0/3".into())));
        assert_eq!("10.0.0.1/3".parse(), Ok(Target::Gpu("10.0.0.1/3".into())));
        for bad in ["", "1.0", "n0", "n0/", "/3"] {
            assert_eq!(bad.parse::<Target>(), Err(BadTarget::Neither(bad.to_owned())));
        }
        assert_eq!("0.0.1,0.0.2".parse::<Target>(), Err(BadTarget::Several("0.0.1,0.0.2".to_owned())));
    }
}
