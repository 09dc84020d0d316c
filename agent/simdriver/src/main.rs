//! `reknit-simdriver`: makes GPUs for the simulated driver, and breaks and mends them.

use anyhow::{anyhow, bail};
use clap::{Parser, Subcommand};
use reknit_simdriver::state::{EventKind, State, StateError, Target};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

/// Bad usage, as in sysexits.h.
const EX_USAGE: u8 = 64;
const LIBRARY: &str = "libreknit_simdriver.so";

/// Controls the simulated NVML driver.
#[derive(Debug, Parser)]
#[command(name = "reknit-simdriver", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Write a state file of healthy GPUs.
    Init {
        /// How many GPUs.
        #[arg(long)]
        gpus: u8,
        /// The node's name. GPUs of different nodes have different UUIDs.
        #[arg(long, default_value = "node0")]
        node: String,
        file: PathBuf,
    },
    /// Print a state file.
    Show { file: PathBuf },
    /// Change what a GPU or the node tells, such as `lost=true` or `temperature=91`.
    Set {
        file: PathBuf,
        /// The GPU's number, from 0; `all` for each GPU, `node` for the driver's own keys.
        target: Target,
        /// KEY=VALUE, one or more. The value is JSON; a bare word is taken as a string.
        #[arg(required = true)]
        changes: Vec<String>,
    },
    /// Raise an event, such as `xid=79`.
    Event {
        file: PathBuf,
        /// The GPU's number, from 0.
        gpu: usize,
        /// xid=NN, recovery_action, single_bit_ecc or double_bit_ecc
        event: RaisedEvent,
        /// Append to this file what the kernel would log for the XID, as a record of /dev/kmsg.
        #[arg(long)]
        kmsg: Option<PathBuf>,
        /// What the kernel's line says after the process, or after the number for the NVLink XIDs 144 to 150.
        #[arg(long, requires = "kmsg")]
        message: Option<String>,
        /// Write the kernel's line only: NVML tells nothing of it.
        #[arg(long, requires = "kmsg")]
        log_only: bool,
    },
    /// Print the path of the library for NVML's clients to load.
    Library,
    /// Print what the library takes NVML's header to say: C expressions and their values.
    #[command(hide = true)]
    Abi,
}

/// An event as the command line names it.
#[derive(Debug, Clone, Copy)]
enum RaisedEvent {
    Xid(u64),
    RecoveryAction,
    SingleBitEcc,
    DoubleBitEcc,
}

impl FromStr for RaisedEvent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "recovery_action" => Ok(Self::RecoveryAction),
            "single_bit_ecc" => Ok(Self::SingleBitEcc),
            "double_bit_ecc" => Ok(Self::DoubleBitEcc),
            xid => {
                let number = xid.strip_prefix("xid=").and_then(|number| number.parse().ok());
                number.map(Self::Xid).ok_or_else(|| {
                    "write xid=NN, recovery_action, single_bit_ecc or double_bit_ecc".to_owned()
                })
            }
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match command {
        Command::Init { gpus, node, file } => State::healthy(&node, gpus.into()).save(&file)?,
        Command::Show { file } => {
            let text = serde_json::to_string_pretty(&State::load(&file)?)?;
            writeln!(out, "{text}")?;
        }
        Command::Set { file, target, changes } => {
            State::update(&file, |state| state.set(target, &changes))?;
        }
        Command::Event { file, gpu, event, kmsg, message, log_only } => {
            if kmsg.is_some() && !matches!(event, RaisedEvent::Xid(_)) {
                bail!("--kmsg goes with xid=NN: the kernel logs no line for the other events");
            }
            State::update(&file, |state| {
                // The log first, as on a real machine.
                if let (Some(log), RaisedEvent::Xid(xid)) = (&kmsg, event) {
                    state.log_xid(gpu, xid, message.as_deref(), log)?;
                }
                if !log_only {
                    raise(state, gpu, event)?;
                }
                Ok(())
            })?;
        }
        Command::Abi => {
            for (expression, value) in reknit_simdriver::abi_table() {
                writeln!(out, "{expression} = {value}")?;
            }
        }
        Command::Library => {
            let library = library()?;
            writeln!(out, "{}", library.display())?;
        }
    }
    Ok(())
}

fn raise(state: &mut State, gpu: usize, event: RaisedEvent) -> Result<u64, StateError> {
    match event {
        RaisedEvent::Xid(xid) => state.raise_xid(gpu, xid),
        RaisedEvent::RecoveryAction => state.raise_recovery_action(gpu),
        RaisedEvent::SingleBitEcc => state.raise(gpu, EventKind::SingleBitEcc, 0),
        RaisedEvent::DoubleBitEcc => state.raise(gpu, EventKind::DoubleBitEcc, 0),
    }
}

/// The newest library beside this program; Cargo leaves a test's build in `deps`.
fn library() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().map_err(|e| anyhow!("cannot find this program's folder: {e}"))?;
    let folder = program.parent().unwrap_or(&program);
    let built = [folder.join(LIBRARY), folder.join("deps").join(LIBRARY)];
    let age = |path: &PathBuf| path.metadata().and_then(|file| file.modified()).ok();
    let newest = built.iter().max_by_key(|path| age(path));
    match newest {
        Some(path) if path.exists() => Ok(path.clone()),
        Some(_) | None => {
            bail!("{} is missing: build it with `cargo build -p reknit-simdriver`", built[0].display())
        }
    }
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(e) if !e.use_stderr() => e.exit(),
        Err(e) => {
            eprintln!("{}", one_line(&e));
            return ExitCode::from(EX_USAGE);
        }
    };
    match run(arguments.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            // The errors name their causes themselves.
            eprintln!("reknit-simdriver: {e}");
            ExitCode::from(EX_USAGE)
        }
    }
}

/// What is wrong, without the usage text that follows it.
fn one_line(e: &clap::Error) -> String {
    let text = e.to_string();
    let lines = text.lines().map(str::trim);
    let told: Vec<&str> = lines.take_while(|line| !line.is_empty()).collect();
    format!("reknit-simdriver: {}", told.join(" "))
}
