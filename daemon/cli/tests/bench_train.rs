//! `reknit bench train` trains the model that tests/peers/model.py has, from the same weights on the same tokens.

#![allow(clippy::unwrap_used)] // A failed set-up fails the test.

use std::process::Command;

/// What `python tests/peers/eager.py --shape small` told with PyTorch 2.15.
const PYTORCH: [(&str, f64); 5] =
    [("1", 5.593492), ("2", 5.144711), ("3", 4.742655), ("5", 3.857493), ("10", 2.435713)];

fn losses(threads: &str, tensor: &str) -> serde_json::Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_reknit"));
    command.args(["bench", "train", "--shape", "small", "--seconds", "1", "--format", "json"]);
    let output = command.args(["--threads", threads, "--tensor", tensor]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let point = &answer["points"][0];
    assert!(point["tokens_per_s"]["median"].as_f64().unwrap() > 0.0, "{point}");
    point["losses"].clone()
}

#[track_caller]
fn those_of_pytorch(losses: &serde_json::Value) {
    for (step, loss) in PYTORCH {
        let got = losses[step].as_f64().unwrap();
        assert!((got / loss - 1.0).abs() < 1e-3, "step {step}: {got} instead of {loss}");
    }
}

#[test]
fn its_first_losses_are_those_of_pytorch() {
    let one = losses("1", "1");
    those_of_pytorch(&one);
    assert_eq!(one, losses("2", "1"), "threads change no bit");
    those_of_pytorch(&losses("1", "2"));
}
