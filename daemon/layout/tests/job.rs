//! Job files: what is accepted, and what the errors say.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use proptest::prelude::*;
use reknit_layout::JobSpec;
use reknit_layout::job::EXAMPLE;

/// The example with one line replaced; `key` as it starts the line.
fn with(key: &str, line: &str) -> String {
    let start = format!("{key} = ");
    assert_eq!(EXAMPLE.lines().filter(|l| l.starts_with(&start)).count(), 1, "{key}");
    let lines = EXAMPLE.lines().map(|l| if l.starts_with(&start) { line } else { l });
    lines.collect::<Vec<_>>().join("\n")
}

fn refused(text: &str) -> String {
    let error = JobSpec::parse(text, "job.toml").unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn the_example_parses_and_shows_the_defaults() {
    let job = JobSpec::parse(EXAMPLE, "example").unwrap();
    assert_eq!(JobSpec::parse(&job.to_toml(), "again").unwrap(), job);

    // Without the lines that are said to have a default nothing changes but min_tensor.
    let mut default = false;
    let mut kept = String::new();
    for line in EXAMPLE.lines() {
        if line.starts_with('#') {
            default = default || line.starts_with("# Default");
            default = default && !line.starts_with("# Required");
        } else {
            if !default {
                kept += &format!("{line}\n");
            }
            default = false;
        }
    }
    let mut bare = JobSpec::parse(&kept, "bare").unwrap();
    assert!(!kept.contains("head_dim") && !kept.contains("tokenizer") && !kept.contains("dir"), "{kept}");
    assert_eq!((bare.parallel.min_tensor, bare.model.head_dim, bare.model.head_dim()), (1, None, 16));
    bare.parallel.min_tensor = 2;
    bare.model.head_dim = Some(16);
    assert_eq!(bare, job);
}

#[test]
fn errors_name_the_line_the_key_and_what_is_allowed() {
    let line = |start: &str| EXAMPLE.lines().position(|line| line.starts_with(start)).unwrap() + 1;
    for (key, bad, says) in [
        (
            "heads",
            "heads = 10",
            "model.heads = 10 is not divisible by kv_heads = 12: every KV head goes with",
        ),
        ("layers", "layers = 0", "model.layers = 0 is out of range: allowed are 1 to 4096"),
        (
            "layers",
            "layers = -1",
            "model.layers: invalid value: integer `-1`, allowed are whole numbers from 0 to",
        ),
        ("layers", "layers = 4294967295", "model.layers = 4294967295 is out of range"),
        (
            "layers",
            "layers = 9223372036854775807",
            "model.layers: invalid value: integer `9223372036854775807`",
        ),
        ("layers", "layers = \"4\"", "model.layers: invalid type: string \"4\", allowed are whole numbers"),
        ("ffn_block", "ffn_block = 0", "model.ffn_block = 0 is out of range"),
        ("ffn_block", "ffn_block = 768", "model.ffn_block gives ffn / ffn_block = 1 units: allowed are 4"),
        ("ffn", "ffn = 770", "model.ffn = 770 is not divisible by ffn_block = 16: a block is never divided"),
        ("vocab", "vocab = 128", "model.vocab = 128 is out of range: allowed are 256 to"),
        (
            "head_dim",
            "head_dim = 15",
            "model.head_dim makes heads of 15: rotary positions need an even head_dim",
        ),
        ("dtype", "dtype = \"f16\"", "model.dtype: unknown value `f16`, allowed are `f32`, `bf16`, `f64`"),
        (
            "dropout",
            "dropout = 1.0",
            "model.dropout = 1 is out of range: allowed are numbers from 0 to below 1",
        ),
        ("dropout", "dropout = nan", "model.dropout = NaN is out of range"),
        ("recompute", "recompute = 1", "model.recompute: invalid type: integer `1`"),
        (
            "kv_heads",
            "kv_heads = 3",
            "model.kv_heads gives kv_heads = 3 units: allowed are 4 (parallel.tensor) to",
        ),
        ("kind", "knd = \"decoder\"", "model.knd: unknown key `knd`, allowed are `kind`, `layers`"),
        ("tensor", "tensor = 0", "parallel.tensor = 0 is out of range"),
        ("data", "data = 4294967295", "parallel.data = 4294967295 is out of range"),
        ("data", "data = 64", "batch.global = 32 is out of range: allowed are 64 to"),
        ("min_tensor", "min_tensor = 5", "parallel.min_tensor = 5 is out of range: allowed are 1 to 4"),
        ("pipeline", "pipeline = 5", "parallel.pipeline = 5 is out of range: allowed are 1 to 4"),
        ("micro", "micro = 33", "batch.micro = 33 is out of range: allowed are 1 to 32"),
        ("lr", "lr = nan", "optimizer.lr = NaN is out of range: allowed are finite numbers above 0"),
        ("lr", "lr = 0.0", "optimizer.lr = 0 is out of range"),
        (
            "min_lr",
            "min_lr = 1.0",
            "optimizer.min_lr = 1 is out of range: allowed are 0 to optimizer.lr = 0.0003",
        ),
        ("betas", "betas = [0.9, 1.0]", "optimizer.betas = [0.9, 1.0] is out of range"),
        ("eps", "eps = inf", "optimizer.eps = inf is out of range"),
        ("weight_decay", "weight_decay = -0.1", "optimizer.weight_decay = -0.1 is out of range"),
        ("decay_steps", "decay_steps = 10", "optimizer.decay_steps = 10 ends before the warm-up"),
        ("files", "files = []", "data.files names no file"),
        (
            "tokenizer",
            "tokenizer = \"gpt2\"",
            "data.tokenizer = \"gpt2\" is no tokenizer: allowed are \"bytes\", \"u16\",",
        ),
        ("spares", "spares = 1025", "recovery.spares = 1025 is out of range: allowed are 0 to 1024"),
        ("data", "data = 65537", "parallel.data = 65537 is out of range: allowed are 1 to 65536"),
        ("every_steps", "every_steps = 5", "checkpoint.every_steps = 5 needs a checkpoint.dir"),
        ("keep", "keep = 0", "checkpoint.keep = 0 is out of range: allowed are 1 to 1000"),
        ("restore", "restore = \"never\"", "checkpoint.restore: unknown value `never`"),
        (
            "from",
            "from = \"/c/step-12\"",
            "checkpoint.from = \"/c/step-12\" is no checkpoint: allowed is its folder",
        ),
        ("name", "name = \"A job\"", "name = \"A job\" is not a job name"),
        ("steps", "steps = 0", "run.steps = 0 is out of range"),
        ("seed", "seed = 99999999999999999999", "run.seed: "),
        ("policy", "policy = keep", "line "),
        ("policy", "policy = \"grow\"", "batch.policy: unknown value `grow`, "),
    ] {
        let error = refused(&with(key, bad));
        assert!(error.contains(says), "{bad}: {error}");
        // The refused value may be another key's: data = 64 makes batch.global wrong.
        let blamed = if says.starts_with("batch.global") { "global" } else { key };
        assert!(
            error.starts_with(&format!("job.toml: line {}: ", line(&format!("{blamed} = ")))),
            "{bad}: {error}"
        );
    }
}

#[test]
fn what_can_be_planned_but_not_trained_is_refused_where_it_is_submitted() {
    assert!(JobSpec::parse_trainable(EXAMPLE, "job.toml").is_ok());
    for (key, line, says) in [
        ("pipeline", "pipeline = 2", "parallel.pipeline = 2 is not supported yet: allowed is 1"),
        (
            "policy",
            "policy = \"shrink\"",
            "batch.policy = \"shrink\" is not supported yet: allowed is \"keep_global\"",
        ),
        ("power_boost", "power_boost = true", "recovery.power_boost = true is not supported yet"),
    ] {
        let text = with(key, line);
        let job = JobSpec::parse(&text, "job.toml").unwrap();
        assert_eq!(JobSpec::parse(&job.to_toml(), "again").unwrap(), job);
        let error = JobSpec::parse_trainable(&text, "job.toml").unwrap_err().to_string();
        let at = text.lines().position(|found| found == line).unwrap() + 1;
        assert_eq!(error.split(says).next(), Some(&*format!("job.toml: line {at}: ")), "{error}");
    }
}

#[test]
fn a_job_has_at_most_a_million_gpus() {
    let many = |data: u32, layers: u32, spares: u32| {
        with("data", &format!("data = {data}"))
            .replace("layers = 4", &format!("layers = {layers}"))
            .replace("pipeline = 1", &format!("pipeline = {layers}"))
            .replace("global = 32", &format!("global = {data}"))
            .replace("spares = 0", &format!("spares = {spares}"))
    };
    let job = JobSpec::parse(&many(32768, 8, 16), "job.toml");
    assert_eq!(job.map(|job| job.parallel.pipeline), Ok(8));
    let error = refused(&many(32769, 8, 0));
    assert!(
        error
            .contains("parallel.data with pipeline and tensor makes 1048608 GPUs: allowed are up to 1048576"),
        "{error}"
    );
    let error = refused(&many(32768, 8, 17));
    assert!(error.contains("recovery.spares = 17 is out of range: allowed are 0 to 16"), "{error}");
}

#[test]
fn a_table_is_not_written_as_a_list() {
    let lists = "parallel = [2, 4, 1, 2]\nrecovery = [0, false]\n";
    for (list, key) in lists.lines().zip(["parallel", "recovery"]) {
        let mut skip = false;
        let others = EXAMPLE.lines().filter(|line| {
            if line.starts_with('[') {
                skip = *line == format!("[{key}]");
            }
            !skip
        });
        let text = [list].into_iter().chain(others).collect::<Vec<_>>().join("\n");
        let error = refused(&text);
        let says = format!("job.toml: line 1: {key}: invalid type: sequence, allowed is a table");
        assert_eq!(error, says);
    }
}

#[test]
fn a_missing_key_or_table_is_named() {
    let without = EXAMPLE.replace("\nseed = 1", "");
    let error = refused(&without);
    assert!(error.contains("run: missing key `seed`"), "{error}");
    let error = refused("");
    assert!(error.contains("missing key `name`"), "{error}");
    let error = refused(&EXAMPLE.replace("name = \"example\"", ""));
    assert!(error.ends_with(": missing key `name`") && !error.contains("model"), "{error}");
    let error = refused(&EXAMPLE.replace("layers = 4", "layers = 4\nlayers = 5"));
    assert!(error.ends_with("at `layers`: duplicate key"), "{error}");
    let error = refused(&EXAMPLE.replace("[run]", "[runn]"));
    assert!(error.contains("runn: unknown key `runn`, allowed are `name`, `model`"), "{error}");
    let error = refused("model = 3");
    assert!(error.ends_with("line 1: model: invalid type: integer `3`, allowed is a table"), "{error}");
    let error = refused(&with("betas", "betas = [0.9]"));
    assert!(error.contains("optimizer.betas: invalid length 1, allowed is a list of two numbers"), "{error}");
    let error = refused("\"a\\n\\u001b[2Jb\" = 1");
    assert!(error.contains("a\\n\\u{1b}[2Jb: unknown key"), "control characters do nothing: {error}");
    let error = refused("name = \"x\"\nlayers");
    assert!(error.starts_with("job.toml: line 2: "), "{error}");
    // A key that stands nowhere is looked for in its table.
    let error = refused(&EXAMPLE.replace("head_dim = 16\n", "").replace("hidden = 192", "hidden = 190"));
    assert!(
        error.contains("model.hidden = 190 is not divisible by heads = 12: set model.head_dim"),
        "{error}"
    );
}

#[test]
fn a_model_whose_bytes_cannot_be_counted_is_refused() {
    let huge = with("layers", "layers = 4096")
        .replace("hidden = 192", "hidden = 1048576")
        .replace("ffn = 768", "ffn = 16777216")
        .replace("ffn_block = 16", "ffn_block = 16384")
        .replace("dtype = \"f32\"", "dtype = \"f64\"");
    let error = refused(&huge);
    assert!(error.contains("model.layers and the other sizes make"), "{error}");
}

proptest! {
    /// No text makes the parser panic, and no number in the place of another.
    #[test]
    fn no_number_panics(line in 0..EXAMPLE.lines().count(), number in prop_oneof![any::<i64>(), 0..300_i64]) {
        let lines = EXAMPLE.lines().enumerate().map(|(at, text)| match text.split_once(" = ") {
            Some((key, _)) if at == line && !key.starts_with('#') => format!("{key} = {number}"),
            Some(_) | None => text.to_owned(),
        });
        let text = lines.collect::<Vec<_>>().join("\n");
        if let Ok(job) = JobSpec::parse(&text, "job.toml") {
            prop_assert_eq!(JobSpec::parse(&job.to_toml(), "again").unwrap(), job);
        }
    }

    #[test]
    fn no_text_panics(text in ".{0,200}", cut in 0..EXAMPLE.len()) {
        let _ = JobSpec::parse(&text, "job.toml");
        if let (Some(head), Some(tail)) = (EXAMPLE.get(..cut), EXAMPLE.get(cut..)) {
            let error = JobSpec::parse(&format!("{head}{text}{tail}"), "job.toml").err();
            prop_assert!(error.is_none_or(|error| !error.to_string().contains('\n')));
        }
    }
}
