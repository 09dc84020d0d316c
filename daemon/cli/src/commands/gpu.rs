//! `reknit gpu`

use crate::admin::{connect, refused};
use crate::failure::Failure;
use crate::output::print_lines;
use crate::{Format, Remote};
use reknit_proto::v1::{DrainGpuRequest, RestoreGpuRequest};
use serde_json::json;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum GpuCommand {
    /// Take a GPU out at a step boundary; no work is lost.
    Drain {
        /// The GPU's UUID.
        uuid: String,
        #[command(flatten)]
        remote: Remote,
    },
    /// Let a drained GPU take part again.
    Restore {
        /// The GPU's UUID.
        uuid: String,
        #[command(flatten)]
        remote: Remote,
    },
}

pub(crate) async fn run(command: GpuCommand) -> Result<(), Failure> {
    match command {
        GpuCommand::Drain { uuid, remote } => {
            let request = DrainGpuRequest { gpu: uuid.clone() };
            connect(&remote.daemon).await?.drain_gpu(request).await.map_err(refused)?;
            done(&remote, &uuid, "drained", "leaves at the next step boundary")
        }
        GpuCommand::Restore { uuid, remote } => {
            let request = RestoreGpuRequest { gpu: uuid.clone() };
            connect(&remote.daemon).await?.restore_gpu(request).await.map_err(refused)?;
            done(&remote, &uuid, "restored", "may take part again")
        }
    }
}

fn done(remote: &Remote, uuid: &str, key: &str, words: &str) -> Result<(), Failure> {
    print_lines(&[match remote.format {
        Format::Text => format!("{uuid} {words}"),
        Format::Json => json!({ key: uuid }).to_string(),
    }])
}
