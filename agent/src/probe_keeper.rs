//! Keeps a probe running: starts it, listens to it, replaces it when it ends or falls silent.

use crate::config::{LogFormat, RunArguments};
use crate::probe::protocol::{Failure, GpuIdentity, ProbeLine, ProbeOrder};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

/// A living probe ticks far more often; a silent one is replaced.
const SILENCE: Duration = Duration::from_secs(3);
/// Loading the driver of a large node takes its time.
const START: Duration = Duration::from_secs(30);
const RESTART: Duration = Duration::from_millis(50);
const RESTART_LIMIT: Duration = Duration::from_secs(2);
/// A probe that lived this long restarts without delay.
const SETTLED: Duration = Duration::from_secs(5);

/// What the keeper tells.
#[derive(Debug)]
pub(crate) enum ProbeNews {
    Line(ProbeLine),
    /// Nothing can be read until another probe is ready.
    Ended {
        why: String,
        library: bool,
    },
}

/// How to start a probe.
#[derive(Debug)]
pub(crate) struct ProbeKeeper {
    pub(crate) library: PathBuf,
    pub(crate) interval: Duration,
    pub(crate) log: LogFormat,
    /// GPUs seen so far.
    pub(crate) known: Vec<GpuIdentity>,
    pub(crate) news: mpsc::Sender<ProbeNews>,
}

impl ProbeKeeper {
    /// Runs until nobody listens. `replace` asks for a fresh probe.
    pub(crate) async fn run(mut self, replace: &Notify) {
        let mut delay = RESTART;
        loop {
            let began = Instant::now();
            let (why, library) = match self.start().await {
                Ok((mut child, mut lines)) => {
                    let end = self.listen(&mut lines, replace).await;
                    // Not waited for: a process stuck in the driver cannot be killed.
                    let _gone_already = child.start_kill();
                    end
                }
                Err(e) => (format!("the probe could not be started: {e}"), false),
            };
            warn!(why, "the probe ended");
            let ended = ProbeNews::Ended { why, library };
            if self.news.send(ended).await.is_err() {
                return;
            }
            if began.elapsed() > SETTLED {
                delay = RESTART;
            }
            sleep(delay).await;
            delay = (delay * 2).min(RESTART_LIMIT);
        }
    }

    async fn start(&self) -> std::io::Result<(Child, Lines<BufReader<ChildStdout>>)> {
        let mut command = Command::new(std::env::current_exe()?);
        RunArguments::variables().iter().for_each(|variable| {
            command.env_remove(variable);
        });
        let mut child = command
            .arg("probe")
            .arg("--nvml-library")
            .arg(&self.library)
            .arg("--interval-ms")
            .arg(self.interval.as_millis().to_string())
            .arg("--log")
            .arg(self.log.name())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A terminal's Ctrl-C is for the agent, which stops the probe itself.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        info!(pid = child.id(), "probe started");
        let mut expected = serde_json::to_vec(&ProbeOrder::Expect { gpus: self.known.clone() })?;
        expected.push(b'\n');
        if let Some(input) = child.stdin.as_mut() {
            input.write_all(&expected).await?;
        }
        let output = child.stdout.take().ok_or(std::io::ErrorKind::BrokenPipe)?;
        Ok((child, BufReader::new(output).lines()))
    }

    /// Passes lines on. Returns why the probe is of no more use, and whether the library is.
    async fn listen(
        &mut self,
        lines: &mut Lines<BufReader<ChildStdout>>,
        replace: &Notify,
    ) -> (String, bool) {
        let mut patience = START;
        loop {
            let line = tokio::select! {
                line = timeout(patience, lines.next_line()) => line,
                () = replace.notified() => return ("no GPU answers".to_owned(), false),
            };
            let line = match line {
                Ok(Ok(Some(line))) => line,
                Ok(Ok(None)) => return ("the probe is gone".to_owned(), false),
                Ok(Err(e)) => return (format!("the probe's pipe broke: {e}"), false),
                Err(_) => return ("the probe is silent".to_owned(), false),
            };
            let line: ProbeLine = match serde_json::from_str(&line) {
                Ok(line) => line,
                Err(e) => return (format!("the probe speaks nonsense: {e}"), false),
            };
            match &line {
                ProbeLine::Failed { reason, message } => {
                    let library = match reason {
                        Failure::Library => true,
                        Failure::Driver => false,
                    };
                    return (message.clone(), library);
                }
                ProbeLine::Ready { gpus, driver, silent: _ } => {
                    info!(driver, gpus = gpus.len(), "probe ready");
                    self.known.clone_from(gpus);
                    patience = SILENCE;
                }
                ProbeLine::Reading { .. }
                | ProbeLine::Xid { .. }
                | ProbeLine::Gap { .. }
                | ProbeLine::PowerLimit { .. }
                | ProbeLine::Tick { .. } => {}
            }
            if self.news.send(ProbeNews::Line(line)).await.is_err() {
                return ("the agent stops".to_owned(), false);
            }
        }
    }
}
