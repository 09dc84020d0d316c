//! Topology files: what is accepted, and what the errors say.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use proptest::prelude::*;
use reknit_layout::topology::EXAMPLE;
use reknit_layout::*;

fn refused(text: &str) -> String {
    let error = Topology::parse(text, "topo.toml").unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

fn names<'a>(gpus: impl IntoIterator<Item = &'a GpuId>) -> Vec<&'a str> {
    gpus.into_iter().map(|gpu| gpu.0.as_str()).collect()
}

#[test]
fn the_example_parses() {
    let topology = Topology::parse(EXAMPLE, "example").unwrap();
    let domains = topology.domains();
    assert_eq!(domains.iter().map(|domain| domain.name.0.as_str()).collect::<Vec<_>>(), ["rack-0", "rack-1"]);
    let gpus = ["n0/0", "n0/1", "n0/2", "n0/3", "n1/0", "n1/1", "n1/2", "n1/3"];
    assert_eq!(names(domains[0].gpus()), gpus);
    assert_eq!((domains[0].power_budget, domains[1].power_budget), (Some(8.0), None));
    assert_eq!((topology.gpu_memory, topology.power_limit), (Some(80 << 30), 1.3));
    for (domain, entry) in domains.iter().enumerate() {
        for node in &entry.nodes {
            for gpu in &node.gpus {
                assert_eq!((topology.domain_of(gpu), topology.node_of(gpu)), (Some(domain), Some(node)));
            }
        }
    }
    assert_eq!(topology.domain_of(&GpuId::from("n0/4")), None);

    // Without the lines that are said to have a default only the memory is not known any more.
    let lines = EXAMPLE.lines().filter(|line| {
        let optional = ["memory_gib", "power_limit", "power_budget", "[gpu]"];
        !optional.iter().any(|key| line.starts_with(key))
    });
    let bare = Topology::parse(&lines.collect::<Vec<_>>().join("\n"), "bare").unwrap();
    assert_eq!((bare.gpu_memory, bare.power_limit, bare.domains()[0].power_budget), (None, 1.3, None));
    assert_eq!(bare.domains()[1], domains[1]);
}

#[test]
fn memory_may_be_a_fraction() {
    let text = EXAMPLE.replace("memory_gib = 80", "memory_gib = 79.5");
    assert_eq!(Topology::parse(&text, "t").unwrap().gpu_memory, Some((79 << 30) + (1 << 29)));
}

#[test]
fn errors_name_the_line_the_key_and_what_is_allowed() {
    let n1 = r#"{ name = "n1", gpus = 4 }"#;
    for (good, bad, line, says) in [
        (
            "memory_gib = 80",
            "memory_gib = 0",
            5,
            "gpu.memory_gib = 0 is out of range: allowed are numbers above 0 up to",
        ),
        ("memory_gib = 80", "memory_gib = -1.5", 5, "gpu.memory_gib = -1.5 is out of range"),
        ("memory_gib = 80", "memory_gib = nan", 5, "gpu.memory_gib = NaN is out of range"),
        ("memory_gib = 80", "memory_gib = inf", 5, "gpu.memory_gib = inf is out of range"),
        (
            "memory_gib = 80",
            "memory_gib = 9223372036854775807",
            5,
            "gpu.memory_gib = 9223372036854776000 is out of range",
        ),
        (
            "memory_gib = 80",
            "memory_gib = \"80\"",
            5,
            "gpu.memory_gib: invalid type: string \"80\", allowed are numbers",
        ),
        ("memory_gib = 80", "memory = 80", 5, "gpu.memory: unknown key `memory`, allowed are `memory_gib`"),
        (
            "power_limit = 1.3",
            "power_limit = 1.4",
            7,
            "gpu.power_limit = 1.4 is out of range: allowed are 1.0 to 1.3",
        ),
        ("power_limit = 1.3", "power_limit = 0.99", 7, "gpu.power_limit = 0.99 is out of range"),
        ("power_limit = 1.3", "power_limit = nan", 7, "gpu.power_limit = NaN is out of range"),
        (
            "name = \"rack-0\"",
            "name = \"\"",
            13,
            "domain[0].name = \"\" is not a name: allowed are 1 to 64 characters",
        ),
        ("name = \"rack-0\"", "name = \"rack 0\"", 13, "domain[0].name = \"rack 0\" is not a name"),
        ("name = \"rack-0\"", "nam = \"rack-0\"", 13, "domain[0].nam: unknown key `nam`, allowed are `name`"),
        (
            "name = \"rack-1\"",
            "name = \"rack-0\"",
            20,
            "domain[1].name = \"rack-0\" is taken: it is the name of domain[0].name",
        ),
        ("power_budget = 8.0", "power_budget = 0.0", 15, "domain[0].power_budget = 0 is out of range"),
        (
            n1,
            r#"{ name = "n1", gpus = 0 }"#,
            17,
            "domain[0].nodes[1].gpus = 0 is out of range: allowed are 1 to 1024",
        ),
        (n1, r#"{ name = "n1", gpus = 1025 }"#, 17, "domain[0].nodes[1].gpus = 1025 is out of range"),
        (
            n1,
            r#"{ name = "n1", gpus = 9223372036854775807 }"#,
            17,
            "domain[0].nodes[1].gpus: invalid value: integer `9223372036854775807`, allowed are whole",
        ),
        (n1, r#"{ name = "n1", gpus = -1 }"#, 17, "domain[0].nodes[1].gpus: invalid value: integer `-1`"),
        (n1, r#"{ name = "n1", gpus = 4, rack = 1 }"#, 17, "domain[0].nodes[1].rack: unknown key `rack`"),
        (n1, r#"{ name = "n1" }"#, 17, "domain[0].nodes[1]: missing key `gpus`"),
        (
            n1,
            r#"{ name = "n0", gpus = 4 }"#,
            17,
            "domain[0].nodes[1].name = \"n0\" is taken: it is the name of domain[0].nodes[0].name",
        ),
        (n1, "7", 17, "domain[0].nodes[1]: invalid type: integer `7`, allowed is a table"),
        (
            r#"nodes = [{ name = "n2", gpus = 8 }]"#,
            "nodes = []",
            21,
            "domain[1].nodes is empty: allowed are one or more",
        ),
        (
            r#"nodes = [{ name = "n2", gpus = 8 }]"#,
            r#"nodes = [{ name = "n1", gpus = 8 }]"#,
            21,
            "domain[1].nodes[0].name = \"n1\" is taken: it is the name of domain[0].nodes[1].name",
        ),
        (r#"nodes = [{ name = "n2", gpus = 8 }]"#, "", 19, "domain[1]: missing key `nodes`"),
    ] {
        assert_eq!(EXAMPLE.matches(good).count(), 1, "{good}");
        let error = refused(&EXAMPLE.replace(good, bad));
        assert!(error.starts_with(&format!("topo.toml: line {line}: {says}")), "{bad}: {error}");
    }
    assert!(refused("").contains("missing key `domain`"));
    assert!(refused("domain = []").starts_with("topo.toml: line 1: domain has no entry"));
    assert!(
        refused("[domain]\nname = \"a\"").contains("line 1: domain: invalid type: map, allowed is a list")
    );
    let node = |index: u32| format!(r#"{{ name = "n{index}", gpus = 1024 }}"#);
    let nodes = (0..1025).map(node).collect::<Vec<_>>().join(",\n");
    let error = refused(&format!("[[domain]]\nname = \"a\"\nnodes = [{nodes}]"));
    assert!(error.contains("line 1027: domain[0].nodes[1024].gpus = 1024 makes more GPUs in all"), "{error}");
}

#[test]
fn without_a_file_each_group_has_a_domain_and_its_spares() {
    let mut job = common::job(2, 2, 12, 12, 12);
    job.parallel.pipeline = 2;
    job.recovery.spares = 1;
    let topology = Topology::nominal(&job);
    let names: Vec<_> = topology.domains().iter().map(|domain| domain.name.0.as_str()).collect();
    assert_eq!(names, ["r0-s0", "r0-s1", "r1-s0", "r1-s1"]);
    for domain in topology.domains() {
        assert_eq!(domain.nodes.len(), 1);
        let node = &domain.nodes[0];
        assert_eq!(node.name.0, domain.name.0);
        assert_eq!(node.gpus, [0, 1, 2].map(|index| GpuId(format!("{}/{index}", node.name))));
    }
}

proptest! {
    #[test]
    fn no_text_panics(text in ".{0,200}", cut in 0..EXAMPLE.len()) {
        let _ = Topology::parse(&text, "topo.toml");
        if let (Some(head), Some(tail)) = (EXAMPLE.get(..cut), EXAMPLE.get(cut..)) {
            let error = Topology::parse(&format!("{head}{text}{tail}"), "topo.toml").err();
            prop_assert!(error.is_none_or(|error| !error.to_string().contains('\n')));
        }
    }

    #[test]
    fn no_number_panics(at in 0..100_usize, number in prop_oneof![any::<i64>(), 0..2000_i64]) {
        let digits = EXAMPLE.match_indices(" = ").map(|(start, _)| start + 3).collect::<Vec<_>>();
        let start = digits[at % digits.len()];
        let end = start + EXAMPLE[start..].find([' ', '\n', '}', ']']).unwrap();
        let text = format!("{}{number}{}", &EXAMPLE[..start], &EXAMPLE[end..]);
        let _ = Topology::parse(&text, "topo.toml");
    }
}

#[test]
fn a_table_is_not_written_as_a_list() {
    for (text, says) in [
        ("[[domain]]\nname = \"d\"\nnodes = [[\"n0\", 8]]", "line 3: domain[0].nodes[0]: "),
        ("domain = [[\"d\", 16.0, []]]", "line 1: domain[0]: "),
        (
            "gpu = [80.0, 1.2]\n[[domain]]\nname = \"d\"\nnodes = [{ name = \"n0\", gpus = 8 }]",
            "line 1: gpu: ",
        ),
    ] {
        let says = format!("topo.toml: {says}invalid type: sequence, allowed is a table");
        assert_eq!(refused(text), says);
    }
}
