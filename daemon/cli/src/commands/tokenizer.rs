//! What can be said of a tokenizer.json without the library that reads it.

use serde_json::Value;
use std::path::Path;

/// That it names tokens, and none that a model of `vocab` tokens does not have. Workers say the same of it, and more: what is
/// not understood here is left to them.
pub(super) fn check(path: &Path, vocab: u32) -> Result<(), String> {
    let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
    let foreign = |why: String| format!("it is no tokenizer of Hugging Face's tokenizers library: {why}");
    let tokenizer: Value = serde_json::from_slice(&bytes).map_err(|error| foreign(error.to_string()))?;
    let model = tokenizer.get("model").filter(|model| model.is_object());
    let model = model.ok_or_else(|| foreign("it has no `model`".to_owned()))?;
    let names = match model.get("vocab") {
        Some(Value::Object(by_name)) => by_name.values().filter_map(Value::as_u64).max(),
        // Unigram: in the order of their numbers.
        Some(Value::Array(in_order)) => (in_order.len() as u64).checked_sub(1),
        Some(_) | None => return Ok(()),
    };
    let added = tokenizer.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
    let largest = names.max(added.filter_map(|token| token.get("id")?.as_u64()).max());
    match largest {
        None => Err("it has no tokens".to_owned()),
        Some(largest) if largest >= vocab.into() => {
            Err(format!("its largest token is {largest}, and model.vocab = {vocab}"))
        }
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_token_of_every_kind_of_model_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        let says = |text: &str| {
            std::fs::write(&path, text).unwrap();
            check(&path, 3)
        };
        let cases = [
            ("", "it is no tokenizer"),
            ("{}", "it has no `model`"),
            (r#"{"model": null}"#, "it has no `model`"),
            (r#"{"added_tokens": null, "model": {"vocab": {}}}"#, "it has no tokens"),
            (r#"{"model": {"vocab": []}}"#, "it has no tokens"),
            (r#"{"model": {"vocab": {"a": 3, "b": 0}}}"#, "largest token is 3, and model.vocab = 3"),
            (r#"{"model": {"vocab": [["a", 0.5], ["b", 1], ["c", 0], ["d", 0]]}}"#, "largest token is 3"),
            (r#"{"added_tokens": [{"id": 7, "content": "x"}], "model": {"vocab": {"a": 0}}}"#, "token is 7"),
        ];
        for (text, expected) in cases {
            let error = says(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        for good in [
            r#"{"model": {"type": "BPE", "vocab": {"a": 2}}}"#,
            r#"{"model": {"vocab": [["a", 0], ["b", 0]]}}"#,
        ] {
            assert_eq!(says(good), Ok(()));
        }
    }
}
