//! From a topology file's text to a topology.

use super::{Domain, Node, POWER_LIMIT, Topology};
use crate::DomainName;
use crate::table::{table, tables};
use crate::toml_file::{self, FileError, Invalid, require};
use serde::Deserialize;
use std::collections::HashMap;

// Far above any cluster there is, and low enough that no file makes more than memory can hold.
const MOST_GPUS_OF_NODE: u32 = 1 << 10;
const MOST_GPUS: u64 = 1 << 20;
const MOST_GIB: f64 = (1 << 20) as f64;
const MOST_POWER: f64 = (1 << 20) as f64;
const GIB: f64 = (1 << 30) as f64;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TopologyFile {
    #[serde(default, deserialize_with = "table")]
    gpu: GpuEntry,
    #[serde(deserialize_with = "tables")]
    domain: Vec<DomainEntry>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct GpuEntry {
    memory_gib: Option<f64>,
    power_limit: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DomainEntry {
    name: String,
    power_budget: Option<f64>,
    #[serde(deserialize_with = "tables")]
    nodes: Vec<NodeEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeEntry {
    name: String,
    gpus: u32,
}

impl Topology {
    /// Parses and checks a topology file. `file` is only its name in errors.
    ///
    /// # Errors
    /// With the line, the key and what is allowed.
    pub fn parse(text: &str, file: &str) -> Result<Self, FileError> {
        let parsed: TopologyFile = toml_file::parse(text, file)?;
        parsed.validate().map_err(|invalid| FileError::of(text, file, &invalid))?;
        Ok(parsed.into())
    }
}

impl From<TopologyFile> for Topology {
    fn from(file: TopologyFile) -> Self {
        let domain = |entry: DomainEntry| Domain {
            name: DomainName(entry.name),
            nodes: entry.nodes.into_iter().map(|node| Node::numbered(node.name, node.gpus)).collect(),
            power_budget: entry.power_budget,
        };
        let memory = file.gpu.memory_gib.map(|gib| (gib * GIB) as u64);
        let mut topology = Self::new(file.domain.into_iter().map(domain).collect(), memory);
        topology.power_limit = file.gpu.power_limit.unwrap_or(POWER_LIMIT);
        topology
    }
}

impl TopologyFile {
    fn validate(&self) -> Result<(), Invalid> {
        let GpuEntry { memory_gib, power_limit } = self.gpu;
        above_zero("gpu.memory_gib", memory_gib, MOST_GIB)?;
        let limit = power_limit.unwrap_or(POWER_LIMIT);
        require((1.0..=POWER_LIMIT).contains(&limit), "gpu.power_limit", || {
            format!("= {limit} is out of range: allowed are 1.0 to {POWER_LIMIT}")
        })?;
        require(!self.domain.is_empty(), "domain", || {
            "has no entry: allowed are one or more, such as [[domain]] name = \"rack-0\"".to_owned()
        })?;

        let (mut domains, mut nodes) = (HashMap::new(), HashMap::new());
        let mut gpus = 0;
        for (index, domain) in self.domain.iter().enumerate() {
            let at = format!("domain[{index}]");
            own_name(&format!("{at}.name"), &domain.name, &mut domains)?;
            above_zero(&format!("{at}.power_budget"), domain.power_budget, MOST_POWER)?;
            let key = format!("{at}.nodes");
            require(!domain.nodes.is_empty(), &key, || {
                "is empty: allowed are one or more, such as { name = \"n0\", gpus = 8 }".to_owned()
            })?;
            for (index, node) in domain.nodes.iter().enumerate() {
                let at = format!("{key}[{index}]");
                own_name(&format!("{at}.name"), &node.name, &mut nodes)?;
                let key = format!("{at}.gpus");
                require((1..=MOST_GPUS_OF_NODE).contains(&node.gpus), &key, || {
                    format!("= {} is out of range: allowed are 1 to {MOST_GPUS_OF_NODE}", node.gpus)
                })?;
                gpus += u64::from(node.gpus);
                require(gpus <= MOST_GPUS, &key, || {
                    format!("= {} makes more GPUs in all than are allowed: up to {MOST_GPUS}", node.gpus)
                })?;
            }
        }
        Ok(())
    }
}

fn above_zero(key: &str, value: Option<f64>, most: f64) -> Result<(), Invalid> {
    let Some(value) = value else { return Ok(()) };
    require(value > 0.0 && value <= most, key, || {
        format!("= {value} is out of range: allowed are numbers above 0 up to {most}")
    })
}

/// The name is well formed and not among those `seen`, where it is kept with its key.
fn own_name<'a>(key: &str, name: &'a str, seen: &mut HashMap<&'a str, String>) -> Result<(), Invalid> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    require((1..=64).contains(&name.len()) && name.chars().all(allowed), key, || {
        format!("= {name:?} is not a name: allowed are 1 to 64 characters of a-z, A-Z, 0-9, `-`, `_` and `.`")
    })?;
    match seen.insert(name, key.to_owned()) {
        None => Ok(()),
        Some(first) => require(false, key, || {
            format!("= {name:?} is taken: it is the name of {first}, each has its own")
        }),
    }
}
