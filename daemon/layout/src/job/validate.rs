//! What a job may ask for.

use super::{JobSpec, ModelSpec, Tokens};
use crate::Family;
use crate::toml_file::{Invalid, require};

// Far above any model there is, and low enough that no product of sizes overflows before it is checked.
const MOST_LAYERS: u32 = 1 << 12;
const MOST_WIDE: u32 = 1 << 20;
const MOST_LONG: u32 = 1 << 24;
const MOST_UNITS: u32 = 1 << 16;
/// Over all layers. A model of 405 billion parameters with `ffn_block = 1` has 6.7 million.
const MOST_UNITS_IN_ALL: u64 = 1 << 24;
/// Over all layers: each axis is divided over the slots.
const MOST_PARTS: u64 = 1 << 18;
const MOST_REPLICAS: u32 = 1 << 16;
const MOST_SLOTS: u32 = 1 << 10;
const MOST_GPUS: u64 = 1 << 20;
const MOST_SPARE_SEATS: u64 = 1 << 22;
const MOST_SAMPLES: u32 = 1 << 20;
const MOST_KEPT: u32 = 1000;
/// What a TOML integer can hold.
const MOST_STEPS: u64 = i64::MAX as u64;

fn between(key: &str, value: u64, least: u64, most: u64) -> Result<(), Invalid> {
    require((least..=most).contains(&value), key, || {
        format!("= {value} is out of range: allowed are {least} to {most}")
    })
}

/// `whole` must be a multiple of `part`, which is not 0.
fn divides(key: &str, whole: u32, name: &str, part: u32, why: &str) -> Result<(), Invalid> {
    require(whole.is_multiple_of(part), key, || {
        format!("= {whole} is not divisible by {name} = {part}: {why}")
    })
}

impl JobSpec {
    /// Checks every value. What passes can be planned without overflow; what can be trained is less
    /// ([`JobSpec::trainable`]).
    pub fn validate(&self) -> Result<(), Invalid> {
        self.check_name()?;
        self.model.validate()?;
        self.check_parallel()?;
        self.check_size()?;
        self.check_batch()?;
        self.check_optimizer()?;
        self.check_rest()
    }

    fn check_name(&self) -> Result<(), Invalid> {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
        let good = (1..=64).contains(&self.name.len()) && self.name.chars().all(allowed);
        require(good, "name", || {
            let name = &self.name;
            format!("= {name:?} is not a job name: allowed are 1 to 64 characters of a-z, 0-9, `-` and `_`")
        })
    }

    fn check_parallel(&self) -> Result<(), Invalid> {
        let (model, parallel) = (&self.model, &self.parallel);
        between("parallel.data", parallel.data.into(), 1, MOST_REPLICAS.into())?;
        between("parallel.tensor", parallel.tensor.into(), 1, MOST_SLOTS.into())?;
        between("parallel.pipeline", parallel.pipeline.into(), 1, model.layers.into())?;
        between("parallel.min_tensor", parallel.min_tensor.into(), 1, parallel.tensor.into())?;
        for (key, name, family) in [
            ("model.kv_heads", "kv_heads", Family::Attn),
            ("model.ffn_block", "ffn / ffn_block", Family::Ffn),
            ("model.vocab_block", "vocab / vocab_block", Family::Vocab),
        ] {
            let (units, tensor) = (model.units(family), parallel.tensor);
            require((tensor..=MOST_UNITS).contains(&units), key, || {
                format!(
                    "gives {name} = {units} units: allowed are {tensor} (parallel.tensor) to {MOST_UNITS}"
                )
            })?;
        }
        let groups = u64::from(parallel.data) * u64::from(parallel.pipeline);
        let gpus = groups * u64::from(parallel.tensor);
        require(gpus <= MOST_GPUS, "parallel.data", || {
            format!("with pipeline and tensor makes {gpus} GPUs: allowed are up to {MOST_GPUS}")
        })?;
        let layers = u64::from(model.layers);
        let a_layer = u64::from(model.units(Family::Attn)) + u64::from(model.units(Family::Ffn));
        let units = layers * a_layer + u64::from(model.units(Family::Vocab));
        require(units <= MOST_UNITS_IN_ALL, "model.layers", || {
            format!(
                "with kv_heads and the blocks makes {units} units: allowed are up to {MOST_UNITS_IN_ALL}; larger blocks make fewer"
            )
        })?;
        let parts = layers * u64::from(parallel.tensor);
        require(parts <= MOST_PARTS, "model.layers", || {
            format!("times parallel.tensor is {parts}: allowed are up to {MOST_PARTS}")
        })?;
        // Without a topology file each group's domain has as many further GPUs.
        let most = (MOST_SPARE_SEATS / groups).min(MOST_SLOTS.into());
        between("recovery.spares", self.recovery.spares.into(), 0, most)
    }

    /// The bytes of all replicas' state must be countable.
    fn check_size(&self) -> Result<(), Invalid> {
        let model = &self.model;
        let layered = [Family::Attn, Family::Ffn];
        let layered =
            layered.map(|family| u128::from(model.units(family)) * u128::from(model.unit_params(family)));
        // Tied or not, the first and the last of several stages have a copy each.
        let vocab = 2 * u128::from(model.vocab) * u128::from(model.hidden);
        let layers = u128::from(model.layers) * layered.iter().sum::<u128>();
        let slots = u128::from(self.parallel.tensor) * u128::from(model.replicated_params());
        let bytes = (layers + vocab + slots) * u128::from(model.dtype.state_bytes());
        let all = bytes * u128::from(self.parallel.data);
        require(all <= u128::from(MOST_STEPS), "model.layers", || {
            format!("and the other sizes make {all} bytes of state over all replicas: allowed are 2^63 - 1")
        })
    }

    fn check_batch(&self) -> Result<(), Invalid> {
        let (batch, data) = (&self.batch, self.parallel.data);
        between("batch.global", batch.global.into(), data.into(), MOST_SAMPLES.into())?;
        between("batch.micro", batch.micro.into(), 1, batch.global.into())
    }

    fn check_optimizer(&self) -> Result<(), Invalid> {
        let o = &self.optimizer;
        for (key, value) in
            [("optimizer.lr", o.lr), ("optimizer.eps", o.eps), ("optimizer.grad_clip", o.grad_clip)]
        {
            require(value.is_finite() && value > 0.0, key, || {
                format!("= {value} is out of range: allowed are finite numbers above 0")
            })?;
        }
        require((0.0..=o.lr).contains(&o.min_lr), "optimizer.min_lr", || {
            format!("= {} is out of range: allowed are 0 to optimizer.lr = {}", o.min_lr, o.lr)
        })?;
        let decay = o.weight_decay;
        require(decay.is_finite() && decay >= 0.0, "optimizer.weight_decay", || {
            format!("= {decay} is out of range: allowed are finite numbers from 0")
        })?;
        let betas = o.betas.iter().all(|beta| (0.0..1.0).contains(beta));
        require(betas, "optimizer.betas", || {
            format!("= {:?} is out of range: allowed are two numbers from 0 to below 1", o.betas)
        })?;
        between("optimizer.warmup_steps", o.warmup_steps, 0, MOST_STEPS)?;
        let (decay, warmup) = (o.decay_steps, o.warmup_steps);
        between("optimizer.decay_steps", decay, 0, MOST_STEPS)?;
        require(decay == 0 || decay >= warmup, "optimizer.decay_steps", || {
            format!(
                "= {decay} ends before the warm-up: allowed are 0 (no decay) and {warmup} (warmup_steps) or more"
            )
        })
    }

    fn check_rest(&self) -> Result<(), Invalid> {
        let files = &self.data.files;
        require(!files.is_empty() && files.iter().all(|file| !file.is_empty()), "data.files", || {
            "names no file: allowed is a list of files or glob patterns, such as [\"corpus/*.txt\"]".into()
        })?;
        let tokenizer = &self.data.tokenizer;
        let tokens = self.data.tokens();
        require(tokens.is_some(), "data.tokenizer", || {
            format!(
                "= {tokenizer:?} is no tokenizer: allowed are \"bytes\", \"u16\", \"u32\" and a file whose name ends in .json"
            )
        })?;
        let least = if tokens == Some(Tokens::Bytes) { 256 } else { 1 };
        between("model.vocab", self.model.vocab.into(), least, MOST_LONG.into())?;
        let checkpoint = &self.checkpoint;
        let every = checkpoint.every_steps;
        require(every == 0 || !checkpoint.dir.is_empty(), "checkpoint.every_steps", || {
            format!("= {every} needs a checkpoint.dir: without one only 0 is allowed")
        })?;
        between("checkpoint.every_steps", every, 0, MOST_STEPS)?;
        between("checkpoint.keep", checkpoint.keep.into(), 1, MOST_KEPT.into())?;
        require(checkpoint.from.is_empty() || checkpoint.origin().is_some(), "checkpoint.from", || {
            format!(
                "= {:?} is no checkpoint: allowed is its folder, such as \"/checkpoints/example/step-000000001200-9f3c0a41d27be865\"",
                checkpoint.from
            )
        })?;
        between("run.steps", self.run.steps, 1, MOST_STEPS)?;
        let steps = self.run.steps;
        let origin = checkpoint.origin().map_or(0, |origin| origin.step.0);
        require(origin < steps, "run.steps", || {
            format!(
                "= {steps} leaves nothing to train behind the checkpoint of step {origin} to start from: allowed are more \
                 steps than it has, counted from the first one on, or an earlier checkpoint"
            )
        })?;
        between("run.seed", self.run.seed, 0, MOST_STEPS)
    }
}

impl ModelSpec {
    /// Checks the sizes by themselves: none is 0, too large, or not divisible where it must be.
    ///
    /// # Errors
    /// With the key and what is allowed.
    pub fn validate(&self) -> Result<(), Invalid> {
        let model = self;
        for (key, value, most) in [
            ("model.layers", model.layers, MOST_LAYERS),
            ("model.hidden", model.hidden, MOST_WIDE),
            ("model.heads", model.heads, MOST_UNITS),
            ("model.kv_heads", model.kv_heads, MOST_UNITS),
            ("model.ffn", model.ffn, MOST_LONG),
            ("model.ffn_block", model.ffn_block, MOST_LONG),
            ("model.vocab", model.vocab, MOST_LONG),
            ("model.vocab_block", model.vocab_block, MOST_LONG),
            ("model.seq_len", model.seq_len, MOST_LONG),
        ] {
            between(key, value.into(), 1, most.into())?;
        }
        let group = "every KV head goes with the same number of query heads";
        divides("model.heads", model.heads, "kv_heads", model.kv_heads, group)?;
        match model.head_dim {
            Some(head_dim) => between("model.head_dim", head_dim.into(), 1, MOST_UNITS.into())?,
            None => divides(
                "model.hidden",
                model.hidden,
                "heads",
                model.heads,
                "set model.head_dim or change one",
            )?,
        }
        let key = if model.head_dim.is_some() { "model.head_dim" } else { "model.hidden" };
        require(model.head_dim().is_multiple_of(2), key, || {
            format!("makes heads of {}: rotary positions need an even head_dim", model.head_dim())
        })?;
        let dropout = model.dropout;
        require((0.0..1.0).contains(&dropout), "model.dropout", || {
            format!("= {dropout} is out of range: allowed are numbers from 0 to below 1")
        })?;
        let block = "a block is never divided";
        divides("model.ffn", model.ffn, "ffn_block", model.ffn_block, block)?;
        divides("model.vocab", model.vocab, "vocab_block", model.vocab_block, block)
    }
}
