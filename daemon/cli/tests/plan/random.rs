//! Many random questions, each answer checked by the rules of `checker`, each the start of the next question.

use super::checker::{Job, check, check_nobody};
use super::printed::{Held, Plan};
use super::{reknit_in, text};
use std::collections::BTreeSet;
use std::path::Path;

/// Random numbers that are the same in every run (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % u64::from(limit)) as u32
    }

    fn from(&mut self, least: u32, most: u32) -> u32 {
        least + self.below(most - least + 1)
    }

    fn job(&mut self) -> Job {
        let (data, tensor, layers) = (self.from(1, 4), self.from(1, 6), self.from(1, 5));
        Job {
            data,
            pipeline: self.from(1, layers.min(3)),
            tensor,
            min_tensor: self.from(1, tensor.min(2)),
            layers,
            kv_heads: self.from(tensor, tensor + 7),
            ffn_units: self.from(tensor, tensor + 9),
            vocab_units: self.from(tensor, tensor + 5),
            tied: self.below(2) == 0,
            global: self.from(data.max(2), 24),
            shrink: self.below(3) == 0,
            spares: if self.below(3) == 0 { self.from(1, 2) } else { 0 },
            boost: self.below(3) == 0,
        }
    }

    /// Domains of two nodes, one more than the job needs now and then.
    fn topology(&mut self, job: &Job) -> String {
        let groups = job.data * job.pipeline + self.below(2);
        let half = job.tensor.div_ceil(2);
        let more = job.tensor - half + self.below(2);
        let domain = |number| {
            let second = match more {
                0 => String::new(),
                more => format!(", {{ name = \"d{number}-x\", gpus = {more} }}"),
            };
            format!(
                "[[domain]]\nname = \"d{number}\"\nnodes = [{{ name = \"d{number}\", gpus = {half} }}{second}]\n"
            )
        };
        (0..groups).map(domain).collect()
    }
}

fn plan(folder: &Path, args: &[String]) -> (Option<i32>, String, String) {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let output = reknit_in(folder, &args);
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn random_plans_keep_the_rules() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (mut planned, mut lost, mut few, mut moved) = (0, 0, 0, 0);
    for seed in 0..120 {
        let mut random = Random(seed);
        let job = random.job();
        std::fs::write(folder.join("job.toml"), job.toml()).unwrap();
        let mut base: Vec<String> =
            ["plan", "--job", "job.toml", "--format", "json"].map(str::to_owned).to_vec();
        if random.below(2) == 0 {
            std::fs::write(folder.join("topology.toml"), random.topology(&job)).unwrap();
            base.extend(["--topology", "topology.toml"].map(str::to_owned));
        }
        let (status, printed, error) = plan(folder, &base);
        assert_eq!(status, Some(0), "seed {seed}: {error}");
        let mut now: Plan = serde_json::from_str(&printed).unwrap();
        check(&job, &now, &now.held(), &BTreeSet::new());
        std::fs::write(folder.join("now.json"), printed).unwrap();
        for turn in 0..4 {
            let mut args = base.clone();
            args.extend(["--holdings", "now.json"].map(str::to_owned));
            args.extend(["--contingency".to_owned(), random.from(1, 2).to_string()]);
            if random.below(3) == 0 {
                let mode = ["uniform_reduction", "drop_replica", "power_of_two"][random.below(3) as usize];
                args.extend(["--mode", mode].map(str::to_owned));
            }
            // Now and then nobody: whoever is away returns.
            let mut failed = BTreeSet::new();
            for _ in 0..random.below(4) {
                let group = &now.groups[random.below(now.groups.len() as u32) as usize];
                let slot = random.below(job.tensor);
                let gpu = &group.slots[slot as usize].gpu;
                let place = format!("{}.{}.{slot}", group.replica, group.stage);
                if !args.contains(&place) {
                    let option = if random.below(3) == 0 { "--drain" } else { "--fail" };
                    if option == "--fail" {
                        failed.insert(gpu.clone());
                    }
                    args.extend([option.to_owned(), place]);
                }
            }
            let before: Held = now.held();
            let (status, printed, error) = plan(folder, &args);
            let says = format!("seed {seed}, turn {turn}: {args:?}\n{}\n{error}", job.toml());
            if status == Some(1) {
                assert!(error.contains("every unit still has a live holder"), "{says}");
                let nobody: Plan = serde_json::from_str(&printed).unwrap();
                let checked = std::panic::catch_unwind(|| check_nobody(&job, &nobody, &before, &failed));
                assert!(checked.is_ok(), "{says}\n{printed}");
                few += 1;
                continue;
            }
            assert!(matches!(status, Some(0 | 2)), "{says}");
            let next: Plan = serde_json::from_str(&printed).unwrap();
            let checked = std::panic::catch_unwind(|| check(&job, &next, &before, &failed));
            assert!(checked.is_ok(), "{says}\n{printed}");
            assert_eq!(next.recoverable, status == Some(0), "{says}");
            if next.recoverable {
                planned += 1;
                moved += usize::from(next.held() != before);
                std::fs::write(folder.join("now.json"), printed).unwrap();
                now = next;
            } else {
                lost += 1;
            }
        }
    }
    // The questions are of every kind.
    assert!(planned > 200 && moved > 150 && lost > 20 && few > 5, "{planned} {moved} {lost} {few}");
}

/// What the rules are worth: each of these changes to a good plan breaks one.
#[test]
fn a_wrong_plan_is_found_out() {
    let job = Job {
        data: 2,
        pipeline: 1,
        tensor: 4,
        min_tensor: 2,
        layers: 3,
        kv_heads: 5,
        ffn_units: 9,
        vocab_units: 4,
        tied: false,
        global: 8,
        shrink: false,
        spares: 0,
        boost: false,
    };
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("job.toml"), job.toml()).unwrap();
    let json = |args: &[&str]| -> serde_json::Value {
        let base = ["plan", "--job", "job.toml", "--format", "json"];
        serde_json::from_str(&text(reknit_in(folder.path(), &[&base, args].concat()).stdout)).unwrap()
    };
    let before: Plan = serde_json::from_value(json(&[])).unwrap();
    let failed = BTreeSet::from(["r0-s0/1".to_owned()]);
    let good = json(&["--fail", "0.0.1"]);
    let passes = |changed: &serde_json::Value| {
        let plan: Plan = serde_json::from_value(changed.clone()).unwrap();
        std::panic::catch_unwind(|| check(&job, &plan, &before.held(), &failed)).is_ok()
    };
    assert!(passes(&good));
    for (pointer, value) in [
        ("/groups/0/partitions/0/owned/0", serde_json::json!([[0, 1]])),
        ("/groups/0/slots/1/active", serde_json::json!(true)),
        ("/groups/1/slots/1/gpu", serde_json::json!("r1-s0/2")),
        ("/batch/0", serde_json::json!(0)),
        ("/batch/1", serde_json::json!(7)),
        ("/transfers/0/from", serde_json::json!("0.0.1")),
        ("/transfers/0/to", serde_json::json!("1.0.0")),
        ("/transfers/0/bytes", serde_json::json!(1)),
        ("/transfers/0/layers", serde_json::json!([0, 1])),
        ("/transfers/0", good["transfers"][1].clone()),
        ("/totals/bytes_moved", serde_json::json!(0)),
        ("/totals/bytes_lower_bound", serde_json::json!(0)),
        ("/totals/max_sent_by_one", serde_json::json!(0)),
        ("/totals/throughput_ratio", serde_json::json!(2.0)),
        ("/sync/0/columns", serde_json::json!(4)),
        ("/sync/0/hosts/1/0", good["sync"][0]["hosts"][1][1].clone()),
        ("/sync/0/partitions/0/columns/0", serde_json::json!([])),
        ("/memory/0/slot", serde_json::json!("0.0.1")),
        ("/power/0/ratio", serde_json::json!(1.2)),
        ("/contingency/by/gpu/unrecoverable", serde_json::json!(1)),
        ("/contingency/by/node/sets", serde_json::json!(3)),
        ("/recoverable", serde_json::json!(false)),
    ] {
        let mut changed = good.clone();
        let place = changed.pointer_mut(pointer).unwrap();
        assert_ne!(*place, value, "{pointer}");
        *place = value;
        assert!(!passes(&changed), "{pointer} is changed and nothing is said");
    }
}
