//! One safetensors file: some units of one axis, or the replicated parameters.
//!
//! It has three tensors of the same shape: `weights`, `first_moments` and `second_moments`. For an axis `[units, rows, hidden]`,
//! the rows of a unit in the order in which they travel between ranks:
//!
//! | family | rows of a unit |
//! |---|---|
//! | attn | query rows of its heads, key rows, value rows, its rows of the transposed output projection |
//! | ffn | gate rows, up rows, its rows of the transposed down projection |
//! | vocab | embedding rows, head rows (none when tied) |
//!
//! For the replicated parameters `[2 layers + 1, hidden]`: of each layer the norm before attention and the norm before the
//! FFN, then the final norm. Numbers are F32 or F64, little-endian.

use crate::manifest::{FileEntry, number_bytes, sha256};
use crate::{CheckpointError, disk};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Family, Units};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use std::collections::HashMap;
use std::path::Path;

/// In the order in which a unit's state travels.
const STATES: [&str; 3] = ["weights", "first_moments", "second_moments"];

/// So many digits of its checksum are in a file's name, and then this.
const CHECKSUM: usize = 32;
const CONTENT: &str = ".safetensors";

/// Of a file before its data: more than the library that reads it allows for a header.
const MOST_HEADER: usize = 128 << 20;

/// Bytes of one unit of `axis`, or of the replicated parameters: a weight and both moments.
pub fn unit_bytes(model: &ModelSpec, axis: Option<Axis>) -> usize {
    STATES.len() * state_bytes(model, axis)
}

/// Of one of the three.
pub(crate) fn state_bytes(model: &ModelSpec, axis: Option<Axis>) -> usize {
    let numbers = axis.map_or(model.replicated_params(), |axis| model.unit_params(axis.family));
    numbers as usize * number_bytes(model)
}

fn shape(model: &ModelSpec, axis: Option<Axis>, units: &Units) -> Vec<usize> {
    let hidden = model.hidden as usize;
    match axis {
        Some(Axis { family: family @ (Family::Attn | Family::Ffn | Family::Vocab), .. }) => {
            vec![units.len() as usize, model.unit_params(family) as usize / hidden, hidden]
        }
        None => vec![model.replicated_params() as usize / hidden, hidden],
    }
}

pub(crate) fn dtype(model: &ModelSpec) -> Dtype {
    if number_bytes(model) == 8 { Dtype::F64 } else { Dtype::F32 }
}

/// Whole units; the replicated parameters are one.
fn unit_count(axis: Option<Axis>, units: &Units) -> usize {
    axis.map_or(1, |_| units.len() as usize)
}

/// The file of these units, whose `state` is as it travels: of each unit its weights, first and second moments.
pub(crate) fn encode(
    model: &ModelSpec,
    axis: Option<Axis>,
    units: &Units,
    state: &[u8],
) -> Result<(FileEntry, Vec<u8>), CheckpointError> {
    let what = axis.map_or("replicated".to_owned(), |axis| axis.to_string().replace('/', "-"));
    let bad = |error: safetensors::SafeTensorError| CheckpointError::damaged(Path::new(&what), error);
    let part = state_bytes(model, axis);
    let regrouped = |number: usize| -> Vec<u8> {
        let parts = state.chunks_exact(part).skip(number).step_by(STATES.len());
        parts.flatten().copied().collect()
    };
    let data: Vec<Vec<u8>> = (0..STATES.len()).map(regrouped).collect();
    let shape = shape(model, axis, units);
    let views = STATES.iter().zip(&data).map(|(name, data)| {
        let view = TensorView::new(dtype(model), shape.clone(), data);
        view.map(|view| ((*name).to_owned(), view)).map_err(bad)
    });
    let views = views.collect::<Result<Vec<_>, _>>()?;
    // One entry alone: the order of several would change the checksum from file to file.
    let note = HashMap::from([("reknit".to_owned(), format!("{what} units {units}"))]);
    let bytes = serialize(views, Some(note)).map_err(bad)?;
    let sha256 = sha256(&bytes);
    let entry = FileEntry {
        file: format!("{what}-{}{CONTENT}", &sha256[..CHECKSUM]),
        axis,
        units: units.clone(),
        bytes: bytes.len() as u64,
        sha256,
    };
    Ok((entry, bytes))
}

/// Whether a file with units is called so.
pub(crate) fn is_content(name: &str) -> bool {
    let digits = |text: &str| text.len() == CHECKSUM && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    name.strip_suffix(CONTENT)
        .and_then(|stem| stem.rsplit_once('-'))
        .is_some_and(|(_, checksum)| digits(checksum))
}

/// Whether a file can be as its entry says: a manifest has no checksum of its own.
///
/// # Errors
/// What is wrong with it, in words.
pub(crate) fn check(model: &ModelSpec, entry: &FileEntry) -> Result<(), String> {
    let FileEntry { file, axis, units, bytes, .. } = entry;
    // It must not lead out of its folder.
    if Path::new(file).file_name() != Some(file.as_ref()) {
        return Err(format!("{file:?} is no file name"));
    }
    let known = axis.and_then(|axis| axis.layer).is_none_or(|layer| layer < model.layers);
    let all = Units::range(0, axis.map_or(0, |axis| model.units(axis.family)));
    if !known || !units.difference(&all).is_empty() {
        return Err(format!("{file} has units that the model has not"));
    }
    let data = unit_bytes(model, *axis).checked_mul(unit_count(*axis, units));
    let most = data.and_then(|data| data.checked_add(MOST_HEADER)).unwrap_or(usize::MAX);
    if *bytes > most as u64 {
        return Err(format!("{file} has {bytes} bytes, more than its units"));
    }
    Ok(())
}

/// A file that has been read and is as its entry says.
pub(crate) struct Stored {
    bytes: Vec<u8>,
    /// Where the three states begin.
    states: [usize; STATES.len()],
    /// Of a unit's part of a state.
    part: usize,
}

impl Stored {
    pub(crate) fn read(folder: &Path, model: &ModelSpec, entry: &FileEntry) -> Result<Self, CheckpointError> {
        let path = folder.join(&entry.file);
        let damaged = |problem: String| CheckpointError::damaged(&path, problem);
        let wrong_length = |found: u64| damaged(format!("it has {found} bytes instead of {}", entry.bytes));
        let (file, length) = disk::open(&path)?;
        if length != entry.bytes {
            return Err(wrong_length(length));
        }
        let bytes = disk::read(file, length).map_err(CheckpointError::io(&path))?;
        if bytes.len() as u64 != length {
            return Err(wrong_length(bytes.len() as u64));
        }
        if sha256(&bytes) != entry.sha256 {
            return Err(damaged("its checksum is wrong".to_owned()));
        }
        let (header, tensors) =
            SafeTensors::read_metadata(&bytes).map_err(|error| damaged(error.to_string()))?;
        let shape = shape(model, entry.axis, &entry.units);
        let part = state_bytes(model, entry.axis);
        let mut states = [0; STATES.len()];
        for (name, begin) in STATES.into_iter().zip(&mut states) {
            let info = tensors.info(name).ok_or_else(|| damaged(format!("it has no {name}")))?;
            if info.shape != shape || info.dtype != dtype(model) {
                return Err(damaged(format!("{name} is {:?} {:?}", info.dtype, info.shape)));
            }
            // Behind the header's length and the header. That the data is there and as long as the shape says was
            // checked with the header.
            *begin = size_of::<u64>() + header + info.data_offsets.0;
        }
        Ok(Self { bytes, states, part })
    }

    /// `out` becomes the state of the unit stored as number `position`, as it travels.
    pub(crate) fn unit(&self, position: usize, out: &mut Vec<u8>) {
        out.clear();
        for begin in self.states {
            let begin = begin + position * self.part;
            out.extend_from_slice(&self.bytes[begin..begin + self.part]);
        }
    }
}
