//! The command line of `reknit plan`.

use super::Target;
use crate::output::Format;
use reknit_layout::Mode;
use std::path::PathBuf;

const EXIT_STATUS: &str = "Exit status:
   0  planned
   1  nobody could train although no unit is lost: no replica has min_tensor slots left in every stage (the JSON is
      still printed), or a slot needs more memory than its GPU has
   2  no live GPU holds some part of the model (the plan is still printed)
  64  wrong arguments or files";

#[derive(Debug, clap::Args)]
#[command(after_help = EXIT_STATUS)]
pub(crate) struct PlanArgs {
    /// The job file. Of one that `reknit job submit` would not take yet, such as one with pipeline stages, a plan can be
    /// made all the same.
    #[arg(long, value_name = "JOB.toml")]
    pub(crate) job: PathBuf,
    /// Where GPUs are. Not given: every group has a domain and a node of its own, named rR-sS.
    #[arg(long, value_name = "TOPO.toml")]
    pub(crate) topology: Option<PathBuf>,
    /// The GPU at this place, or of this name (n0/3), is gone with all that it holds. Repeat the option for each.
    #[arg(long, value_name = "R.S.T|GPU")]
    pub(crate) fail: Vec<Target>,
    /// Every GPU of this node is gone. Repeat the option for each.
    #[arg(long, value_name = "NAME")]
    pub(crate) fail_node: Vec<String>,
    /// The GPU at this place, or of this name, shall leave and can still be read. Repeat the option for each.
    #[arg(long, value_name = "R.S.T|GPU")]
    pub(crate) drain: Vec<Target>,
    /// How to go on: ntp (each group with what it has left), or for comparison uniform_reduction, drop_replica or
    /// power_of_two.
    #[arg(long, default_value_t = Mode::Ntp)]
    pub(crate) mode: Mode,
    /// What every GPU holds: places with their units, or what `reknit plan --format json` printed. Not given: all
    /// places hold their nominal units.
    #[arg(long, value_name = "FILE.json")]
    pub(crate) holdings: Option<PathBuf>,
    /// Look ahead to the loss of this many more GPUs, nodes or domains at once: 1 or 2. A table shows both.
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    pub(crate) contingency: u32,
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub(crate) format: Format,
    /// Nothing is allowed here; it is taken to say what was meant.
    #[arg(hide = true)]
    pub(crate) stray: Vec<String>,
}
