//! The weights alone, as one safetensors file that other tools read.
//!
//! Names, orientation (`[out, in]`) and conventions are those of Hugging Face's Llama models, whose shape this is: RMSNorm, rotary
//! positions with the first half of a head paired with the second, query heads in the order of their KV heads, SwiGLU.

use crate::{Checkpoint, CheckpointError, disk};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Units};
use safetensors::tensor::{Dtype, View, serialize_to_file};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

/// Writes all weights into `out`, one axis of the model in memory at a time. `told` hears of every tensor, by name.
///
/// # Errors
/// The checkpoint cannot be read, or `out` not be written: there is no new `out` then.
pub fn export(checkpoint: &Checkpoint, out: &Path, told: impl Fn(&str)) -> Result<usize, CheckpointError> {
    let model = &checkpoint.manifest().heading.model;
    let source = Source { checkpoint, model, axis: RefCell::default(), failed: RefCell::default() };
    let tensors = tensors(model);
    let count = tensors.len();
    let views = tensors.into_iter().map(|(name, content)| {
        let shape = content.shape(model);
        let view = Lazy { name: name.clone(), content, shape, source: &source, told: &told };
        (name, view)
    });
    let mut partial = out.as_os_str().to_owned();
    partial.push(".partial");
    let partial = Path::new(&partial);
    let note = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let written = serialize_to_file(views, Some(note), partial).map_err(|error| match error {
        safetensors::SafeTensorError::IoError(error) => CheckpointError::io(out)(error),
        other => CheckpointError::damaged(out, other),
    });
    let done = written.and_then(|()| match source.failed.take() {
        Some(error) => Err(error),
        None => std::fs::File::open(partial)
            .and_then(|file| file.sync_all())
            .and_then(|()| std::fs::rename(partial, out))
            .map_err(CheckpointError::io(out)),
    });
    if let Err(error) = done {
        let _ = std::fs::remove_file(partial);
        return Err(error);
    }
    if let Some(folder) = out.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        disk::sync_folder(folder)?;
    }
    Ok(count)
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
    /// The last axis that was read: several tensors come of one.
    axis: RefCell<Option<(Option<Axis>, Vec<u8>)>>,
    /// The library that writes asks for bytes and takes no error.
    failed: RefCell<Option<CheckpointError>>,
}

impl Source<'_> {
    /// The weights of all units of `axis`, or of the norms.
    fn weights(&self, axis: Option<Axis>) -> Result<Vec<u8>, CheckpointError> {
        if let Some((of, weights)) = &*self.axis.borrow()
            && *of == axis
        {
            return Ok(weights.clone());
        }
        let all = |axis: Axis| (axis, Units::range(0, self.model.units(axis.family)));
        let owned: BTreeMap<Axis, Units> = axis.map(all).into_iter().collect();
        let blocks = self.checkpoint.load(&owned)?;
        let mut weights = Vec::new();
        let unit = crate::codec::unit_bytes(self.model, axis);
        match axis {
            None => {
                let norms = blocks.iter().find(|block| block.axis.is_none());
                weights.extend(norms.iter().flat_map(|block| &block.state[..unit / 3]));
            }
            Some(axis) => {
                weights.resize(self.model.units(axis.family) as usize * (unit / 3), 0);
                for block in blocks.iter().filter(|block| block.axis == Some(axis)) {
                    for (number, state) in block.units.iter().zip(block.state.chunks_exact(unit)) {
                        let to = number as usize * (unit / 3);
                        weights[to..to + unit / 3].copy_from_slice(&state[..unit / 3]);
                    }
                }
            }
        }
        *self.axis.borrow_mut() = Some((axis, weights.clone()));
        Ok(weights)
    }
}

struct Lazy<'a, F> {
    name: String,
    content: Content,
    shape: Vec<usize>,
    source: &'a Source<'a>,
    told: &'a F,
}

impl<F> Lazy<'_, F> {
    fn number(&self) -> usize {
        crate::manifest::number_bytes(self.source.model)
    }

    fn bytes(&self) -> Result<Vec<u8>, CheckpointError> {
        let row = self.source.model.hidden as usize * self.number();
        match &self.content {
            Content::Norm(number) => {
                let norms = self.source.weights(None)?;
                Ok(norms[number * row..(number + 1) * row].to_vec())
            }
            Content::Rows { axis, rows, transposed } => {
                let weights = self.source.weights(Some(*axis))?;
                let unit = self.source.model.unit_params(axis.family) as usize * self.number();
                let of_unit = |unit: &[u8]| unit[rows.start * row..rows.end * row].to_vec();
                let picked: Vec<u8> = weights.chunks_exact(unit).flat_map(of_unit).collect();
                Ok(if *transposed { transpose(&picked, row, self.number()) } else { picked })
            }
        }
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

impl<F: Fn(&str)> View for Lazy<'_, F> {
    fn dtype(&self) -> Dtype {
        if self.number() == 8 { Dtype::F64 } else { Dtype::F32 }
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        (self.told)(&self.name);
        match self.bytes() {
            Ok(bytes) => bytes.into(),
            Err(error) => {
                self.source.failed.borrow_mut().get_or_insert(error);
                vec![0; self.data_len()].into()
            }
        }
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.number()
    }
}
