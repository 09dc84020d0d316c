//! The data plane's bench on small buffers: every point is there, and was measured.

use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    let reknit = Command::new(env!("CARGO_BIN_EXE_reknit")).args(["bench", "plane"]).args(args).output();
    reknit.expect("reknit runs")
}

#[test]
fn every_point_is_measured() {
    let args = ["--ranks", "2,3", "--sizes", "4KiB,36", "--seconds", "0.01", "--format", "json"];
    let output = bench(&args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let figures: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON value");
    let points = figures["points"].as_array().expect("points");
    for transport in ["shm", "unix", "tcp"] {
        for (ranks, bytes) in [(2, 4096), (2, 36), (3, 4096), (3, 36)] {
            for exchange in ["all_reduce", "receive", "all_to_all"] {
                let found: Vec<_> = points
                    .iter()
                    .filter(|point| {
                        point["transport"] == transport
                            && point["exchange"] == exchange
                            && (point["ranks"].as_u64(), point["bytes"].as_u64())
                                == (Some(ranks), Some(bytes))
                    })
                    .collect();
                assert_eq!(found.len(), 1, "{transport} {exchange} {ranks} {bytes}: {figures}");
                let (best, median) = (found[0]["best_us"].as_f64(), found[0]["median_us"].as_f64());
                assert!(best > Some(0.0) && median >= best, "{figures}");
                assert!(found[0]["rounds"].as_u64() >= Some(5), "{figures}");
            }
        }
    }
    assert_eq!(points.len(), 3 * 4 * 3);
    let copies = figures["copies"].as_array().expect("copies");
    let sizes: Vec<_> = copies.iter().filter_map(|copy| copy["bytes"].as_u64()).collect();
    assert_eq!(sizes, [4096, 36]);
    for copy in ["memcpy_us", "memcpy_together_us", "unix_us", "tcp_us"] {
        assert!(copies.iter().all(|copies| copies[copy].as_f64() >= Some(0.0)), "{figures}");
    }
}

#[test]
fn sizes_that_are_no_buffer_are_refused() {
    for size in ["4095", "0", "4GiB", "many"] {
        let output = bench(&["--sizes", size]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(64) && error.contains("4KiB"), "{error}");
    }
}
