//! `reknit-simdriver`: makes GPUs for the simulated driver, and breaks and mends them.

use anyhow::{anyhow, bail};
use clap::{Parser, Subcommand};
use reknit_simdriver::state::State;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

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
    /// Change what a GPU tells, such as `lost=true` or `temperature=91`.
    Set {
        file: PathBuf,
        /// The GPU's number, from 0.
        gpu: usize,
        /// KEY=VALUE, one or more.
        #[arg(required = true)]
        changes: Vec<String>,
    },
    /// Raise an XID error, such as `xid=79`.
    Event {
        file: PathBuf,
        /// The GPU's number, from 0.
        gpu: usize,
        /// xid=NN
        #[arg(value_parser = xid)]
        event: u64,
    },
    /// Print the path of the library for NVML's clients to load.
    Library,
}

fn xid(text: &str) -> Result<u64, String> {
    text.strip_prefix("xid=")
        .and_then(|number| number.parse().ok())
        .ok_or_else(|| "write xid=NN, such as xid=79".to_owned())
}

fn run(command: Command) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match command {
        Command::Init { gpus, node, file } => State::healthy(&node, gpus.into()).save(&file)?,
        Command::Show { file } => {
            let text = serde_json::to_string_pretty(&State::load(&file)?)?;
            writeln!(out, "{text}")?;
        }
        Command::Set { file, gpu, changes } => {
            State::update(&file, |state| state.set(gpu, &changes))?;
        }
        Command::Event { file, gpu, event } => {
            State::update(&file, |state| state.raise_xid(gpu, event))?;
        }
        Command::Library => {
            let library = library()?;
            writeln!(out, "{}", library.display())?;
        }
    }
    Ok(())
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
