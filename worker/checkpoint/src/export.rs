//! The weights alone, as one safetensors file that other tools read.
//!
//! Names, orientation (`[out, in]`) and conventions are those of Hugging Face's Llama models, whose shape this is: RMSNorm, rotary
//! positions with the first half of a head paired with the second, query heads in the order of their KV heads, SwiGLU.

use crate::{Checkpoint, CheckpointError, codec, disk, manifest};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Units};
use safetensors::tensor::{Metadata, TensorInfo};
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Writes all weights into `out`, one axis of the model in memory at a time. `told` hears of every tensor, by name.
///
/// # Errors
/// The checkpoint cannot be read, or `out` not be written: what was there is as it was then.
pub fn export(checkpoint: &Checkpoint, out: &Path, told: impl Fn(&str)) -> Result<usize, CheckpointError> {
    let out = &target(out)?;
    let mut partial = out.as_os_str().to_owned();
    partial.push(format!(".{}.partial", std::process::id()));
    let partial = Path::new(&partial);
    let file = File::create_new(partial).map_err(CheckpointError::io(partial))?;
    let written = write(checkpoint, file, out, told).and_then(|count| {
        fs::rename(partial, out).map_err(CheckpointError::io(out))?;
        Ok(count)
    });
    let count = written.inspect_err(|_| drop(fs::remove_file(partial)))?;
    if let Some(folder) = out.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        disk::sync_folder(folder)?;
    }
    Ok(count)
}

/// What is to be replaced, behind all links. A device or a pipe is not: what is written to it would lie in a file beside it.
fn target(out: &Path) -> Result<PathBuf, CheckpointError> {
    match fs::canonicalize(out) {
        Ok(there) if there.is_file() => Ok(there),
        Ok(_) => Err(CheckpointError::NoTarget { path: out.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound && !out.is_symlink() => Ok(out.to_owned()),
        Err(error) => Err(CheckpointError::io(out)(error)),
    }
}

fn write(
    checkpoint: &Checkpoint,
    file: File,
    out: &Path,
    told: impl Fn(&str),
) -> Result<usize, CheckpointError> {
    let model = &checkpoint.manifest().heading.model;
    let tensors = tensors(model);
    let mut end = 0;
    let infos = tensors.iter().map(|(name, content)| {
        let shape = content.shape(model);
        let begin = end;
        end += shape.iter().product::<usize>() * manifest::number_bytes(model);
        (name.clone(), TensorInfo { dtype: codec::dtype(model), shape, data_offsets: (begin, end) })
    });
    let infos = infos.collect();
    let note = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let header = Metadata::new(Some(note), infos).map_err(|error| CheckpointError::damaged(out, error))?;
    let mut header = serde_json::to_vec(&header).map_err(|error| CheckpointError::damaged(out, error))?;
    // The data begins at a multiple of 8.
    header.resize(header.len().next_multiple_of(8), b' ');

    let failed = || CheckpointError::io(out);
    let mut file = BufWriter::new(file);
    file.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed())?;
    file.write_all(&header).map_err(failed())?;
    let mut source = Source { checkpoint, model, last: None };
    for (name, content) in &tensors {
        told(name);
        file.write_all(&source.tensor(content)?).map_err(failed())?;
    }
    file.into_inner()
        .map_err(io::IntoInnerError::into_error)
        .and_then(|file| file.sync_all())
        .map_err(failed())?;
    Ok(tensors.len())
}

/// Where a tensor comes from.
enum Content {
    /// One of the norms.
    Norm(usize),
    /// These rows of every unit, one after the other; as columns where `transposed`.
    Rows { axis: Axis, rows: Range<usize>, transposed: bool },
}

impl Content {
    fn shape(&self, model: &ModelSpec) -> Vec<usize> {
        let hidden = model.hidden as usize;
        match self {
            Self::Norm(_) => vec![hidden],
            Self::Rows { axis, rows, transposed } => {
                let all = rows.len() * model.units(axis.family) as usize;
                if *transposed { vec![hidden, all] } else { vec![all, hidden] }
            }
        }
    }
}

fn tensors(model: &ModelSpec) -> Vec<(String, Content)> {
    let (dim, block) = (model.head_dim() as usize, model.ffn_block as usize);
    let queries = (model.heads / model.kv_heads) as usize * dim;
    let vocab = model.vocab_block as usize;
    let rows = |axis, rows, transposed| Content::Rows { axis, rows, transposed };
    let mut all = vec![
        ("model.embed_tokens.weight".to_owned(), rows(Axis::vocab(), 0..vocab, false)),
        ("model.norm.weight".to_owned(), Content::Norm(2 * model.layers as usize)),
    ];
    if !model.tie_embeddings {
        all.push(("lm_head.weight".to_owned(), rows(Axis::vocab(), vocab..2 * vocab, false)));
    }
    for layer in 0..model.layers {
        let (attn, ffn, norms) = (Axis::attn(layer), Axis::ffn(layer), 2 * layer as usize);
        let of_layer = [
            ("input_layernorm", Content::Norm(norms)),
            ("post_attention_layernorm", Content::Norm(norms + 1)),
            ("self_attn.q_proj", rows(attn, 0..queries, false)),
            ("self_attn.k_proj", rows(attn, queries..queries + dim, false)),
            ("self_attn.v_proj", rows(attn, queries + dim..queries + 2 * dim, false)),
            ("self_attn.o_proj", rows(attn, queries + 2 * dim..2 * queries + 2 * dim, true)),
            ("mlp.gate_proj", rows(ffn, 0..block, false)),
            ("mlp.up_proj", rows(ffn, block..2 * block, false)),
            ("mlp.down_proj", rows(ffn, 2 * block..3 * block, true)),
        ];
        let named = of_layer.map(|(name, content)| (format!("model.layers.{layer}.{name}.weight"), content));
        all.extend(named);
    }
    all
}

struct Source<'a> {
    checkpoint: &'a Checkpoint,
    model: &'a ModelSpec,
    /// The weights of the axis that was read last, or of the norms: several tensors come of one.
    last: Option<(Option<Axis>, Vec<u8>)>,
}

impl Source<'_> {
    fn tensor(&mut self, content: &Content) -> Result<Vec<u8>, CheckpointError> {
        let number = manifest::number_bytes(self.model);
        let row = self.model.hidden as usize * number;
        match content {
            Content::Norm(number) => {
                let norms = self.weights(None)?;
                Ok(norms[number * row..(number + 1) * row].to_vec())
            }
            Content::Rows { axis, rows, transposed } => {
                let unit = codec::state_bytes(self.model, Some(*axis));
                let of_unit = |unit: &[u8]| unit[rows.start * row..rows.end * row].to_vec();
                let picked: Vec<u8> =
                    self.weights(Some(*axis))?.chunks_exact(unit).flat_map(of_unit).collect();
                Ok(if *transposed { transpose(&picked, row, number) } else { picked })
            }
        }
    }

    /// The weights of all units of `axis`, or of the norms.
    fn weights(&mut self, axis: Option<Axis>) -> Result<&[u8], CheckpointError> {
        let weights = match self.last.take() {
            Some((of, weights)) if of == axis => weights,
            Some(_) | None => self.read(axis)?,
        };
        Ok(&self.last.insert((axis, weights)).1)
    }

    fn read(&self, axis: Option<Axis>) -> Result<Vec<u8>, CheckpointError> {
        let all = axis.map(|axis| (axis, Units::range(0, self.model.units(axis.family))));
        let count = all.as_ref().map_or(1, |(_, units)| units.len() as usize);
        let unit = codec::state_bytes(self.model, axis);
        let mut weights = vec![0; count * unit];
        self.checkpoint.load(&all.into_iter().collect::<BTreeMap<_, _>>(), |of, units, state| {
            if of == axis {
                // The replicated parameters are one unit.
                let numbers = units.iter().chain(axis.is_none().then_some(0));
                for (number, state) in numbers.zip(state.chunks_exact(codec::unit_bytes(self.model, axis))) {
                    weights[number as usize * unit..][..unit].copy_from_slice(&state[..unit]);
                }
            }
            Ok::<_, CheckpointError>(())
        })?;
        Ok(weights)
    }
}

/// Of a matrix with rows of `row` bytes and numbers of `number` bytes.
fn transpose(matrix: &[u8], row: usize, number: usize) -> Vec<u8> {
    let (rows, columns) = (matrix.len() / row, row / number);
    let mut out = Vec::with_capacity(matrix.len());
    for column in 0..columns {
        for line in 0..rows {
            let at = line * row + column * number;
            out.extend_from_slice(&matrix[at..at + number]);
        }
    }
    out
}
