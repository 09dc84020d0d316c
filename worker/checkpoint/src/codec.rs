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
use crate::{CheckpointError, Heading};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Family, Units};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use std::collections::HashMap;
use std::path::Path;

/// In the order in which a unit's state travels.
const STATES: [&str; 3] = ["weights", "first_moments", "second_moments"];

/// Bytes of one unit of `axis`, or of the replicated parameters: a weight and both moments.
pub fn unit_bytes(model: &ModelSpec, axis: Option<Axis>) -> usize {
    STATES.len() * state_bytes(model, axis)
}

/// Of one of the three.
fn state_bytes(model: &ModelSpec, axis: Option<Axis>) -> usize {
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

fn dtype(model: &ModelSpec) -> Dtype {
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
        file: format!("{what}-{}.safetensors", &sha256[..32]),
        axis,
        units: units.clone(),
        bytes: bytes.len() as u64,
        sha256,
    };
    Ok((entry, bytes))
}

/// Reads a file and checks it against its entry: the three states, each all units in order.
pub(crate) fn read(
    folder: &Path,
    heading: &Heading,
    entry: &FileEntry,
) -> Result<[Vec<u8>; 3], CheckpointError> {
    let path = folder.join(&entry.file);
    // The manifest is checked by nobody else: it must not lead out of its folder.
    if Path::new(&entry.file).file_name() != Some(entry.file.as_ref()) {
        return Err(CheckpointError::damaged(folder, format!("{:?} is no file name", entry.file)));
    }
    let bytes = std::fs::read(&path).map_err(CheckpointError::io(&path))?;
    if bytes.len() as u64 != entry.bytes {
        let problem = format!("it has {} bytes instead of {}", bytes.len(), entry.bytes);
        return Err(CheckpointError::damaged(&path, problem));
    }
    if sha256(&bytes) != entry.sha256 {
        return Err(CheckpointError::damaged(&path, "its checksum is wrong"));
    }
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| CheckpointError::damaged(&path, error))?;
    let model = &heading.model;
    let length = unit_count(entry.axis, &entry.units) * state_bytes(model, entry.axis);
    let state = |name: &str| {
        let tensor = tensors.tensor(name).map_err(|error| CheckpointError::damaged(&path, error))?;
        let same = tensor.shape() == shape(model, entry.axis, &entry.units) && tensor.dtype() == dtype(model);
        if !same || tensor.data().len() != length {
            let problem = format!("{name} is {:?} {:?}", tensor.dtype(), tensor.shape());
            return Err(CheckpointError::damaged(&path, problem));
        }
        Ok(tensor.data().to_vec())
    };
    let [weights, first, second] = STATES;
    Ok([state(weights)?, state(first)?, state(second)?])
}

/// Of a file's three states, the unit stored as number `position`, as it travels.
pub(crate) fn unit_state(
    model: &ModelSpec,
    axis: Option<Axis>,
    states: &[Vec<u8>; 3],
    position: usize,
    out: &mut Vec<u8>,
) {
    let part = state_bytes(model, axis);
    for state in states {
        out.extend_from_slice(&state[position * part..(position + 1) * part]);
    }
}
