//! The demo as one watches it: a log of what happened and, on a terminal, a status area under it.

mod line;
mod spark;
mod status;

use crate::local::{Fault, FaultKind, Moment, Phases, Record, degrees_text};
use crate::output::bytes_text;
use line::{Line, Style};
use std::io::{IsTerminal, Write};
use std::time::Instant;

/// Where it is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    Stdout,
    Stderr,
}

#[derive(Debug)]
pub(crate) struct View {
    target: Target,
    rich: bool,
    colour: bool,
    started: Instant,
    /// Lines of the status area on the screen now.
    drawn: usize,
    /// Which run of the demo this is, if there are two.
    run: String,
    steps: u64,
}

impl View {
    /// `plain`: a line per step and event, and nothing redrawn, whatever the output is.
    pub(crate) fn new(target: Target, plain: bool) -> Self {
        let terminal = match target {
            Target::Stdout => std::io::stdout().is_terminal(),
            Target::Stderr => std::io::stderr().is_terminal(),
        };
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let rich = terminal && !plain && !dumb;
        let mut view = Self {
            target,
            rich,
            colour: rich && std::env::var_os("NO_COLOR").is_none(),
            started: Instant::now(),
            drawn: 0,
            run: String::new(),
            steps: 0,
        };
        if rich {
            view.write("\x1b[?25l");
        }
        view
    }

    /// A run of so many steps begins. `run` says which one it is, if there are two.
    pub(crate) fn begin(&mut self, run: &str, headline: &str, steps: u64) {
        self.steps = steps;
        run.clone_into(&mut self.run);
        self.say(Line::new().add(Style::Bold, headline));
    }

    /// The demo breaks something.
    pub(crate) fn fault(&mut self, text: &str) {
        self.say(Line::new().add(Style::Red, text));
    }

    /// The demo mends something.
    pub(crate) fn mend(&mut self, text: &str) {
        self.say(Line::new().add(Style::Green, text));
    }

    pub(crate) fn note(&mut self, text: &str) {
        self.say(Line::new().add(Style::Plain, text));
    }

    /// Something that the cluster reported.
    pub(crate) fn moment(&mut self, record: &Record, moment: &Moment) {
        match moment {
            Moment::Step(step) => self.step(record, *step),
            // The status area shows the phase.
            Moment::Phase { explanation, .. } if self.rich && explanation.is_empty() => {}
            // `--plain` and `reknit job show` give the daemon's own reason.
            Moment::Phase { phase, explanation } if self.rich && phase == "Quiescing" => {
                let open = record.open_fault().map(Fault::words);
                let reason = open.as_deref().unwrap_or(explanation);
                self.say(Line::new().add(Style::Dim, format!("stopping: {reason}")));
            }
            Moment::Phase { phase, explanation } => {
                let colon = if explanation.is_empty() { "" } else { ": " };
                self.say(Line::new().add(Style::Dim, format!("job is {phase}{colon}{explanation}")));
            }
            Moment::Layout { epoch, degrees, batch, resume_step, bytes_moved } => {
                let shares: Vec<_> = batch.iter().map(u32::to_string).collect();
                let text = format!(
                    "layout of epoch {epoch}: {}, samples {}, {} moved, from step {}",
                    degrees_text(degrees),
                    shares.join("+"),
                    bytes_text(*bytes_moved),
                    resume_step + 1
                );
                self.say(Line::new().add(Style::Green, text));
            }
            Moment::Recovered(index) => self.recovered(record, *index),
            Moment::Changed { what, place, ms } => {
                let text = format!("{what} at {place}: {ms:.0} ms from the pause to the next step");
                self.say(Line::new().add(Style::Green, text));
            }
            // All workers start at once: too much to read.
            Moment::Worker { .. } if self.rich && record.layouts.is_empty() => {}
            Moment::Worker { place, node, pid, state } => {
                let place = if place.is_empty() { String::new() } else { format!(" {place}") };
                self.say(
                    Line::new().add(Style::Dim, format!("worker{place} on {node} (pid {pid}): {state}")),
                );
            }
            Moment::Note(text) => self.say(Line::new().add(Style::Dim, text.as_str())),
        }
        self.draw(record);
    }

    fn step(&mut self, record: &Record, step: u64) {
        if self.rich {
            return;
        }
        let loss = record.steps.get(&step).map_or(f64::NAN, |seen| seen.loss);
        let rate = record.tokens_per_second(8).map_or(String::new(), |rate| format!("  {rate:.0} tokens/s"));
        let degrees = degrees_text(record.degrees());
        self.say(
            Line::new()
                .add(Style::Plain, format!("step {step}/{}  loss {loss:.4}{rate}  {degrees}", self.steps)),
        );
    }

    fn recovered(&mut self, record: &Record, index: usize) {
        let (Some(fault), Some(phases)) = (record.faults.get(index), record.phases(index)) else { return };
        let what = match fault.kind {
            FaultKind::WorkerKilled => "the kill",
            FaultKind::Frozen => "the freeze",
            FaultKind::GpuLost => "the loss",
        };
        let mut text = format!("recovered from {what} in {:.0} ms", phases.total);
        if let Some(incident) = &fault.incident {
            text += &format!("; first seen by {}", incident.first_reporter);
            if !self.rich {
                text += &format!(" ({})", incident.signal);
            }
        }
        self.say(Line::new().add(Style::Green, text));
        self.say(phase_line(&phases, self.rich.then(|| self.width() - STAMP)));
    }

    /// A line without a time, after the run.
    pub(crate) fn text(&mut self, text: &str) {
        self.write(&format!("{text}\n"));
    }

    /// The time goes on, so the status does.
    pub(crate) fn draw(&mut self, record: &Record) {
        if !self.rich {
            return;
        }
        let lines = status::lines(record, self.steps, &self.run, self.started.elapsed(), self.width());
        let mut text = self.erase();
        for line in &lines {
            text.push_str(&line.render(self.colour, self.width()));
            text.push('\n');
        }
        self.write(&text);
        self.drawn = lines.len();
    }

    /// Takes the status area away and gives the terminal back.
    pub(crate) fn end(&mut self) {
        if self.rich {
            let text = self.erase() + "\x1b[?25h";
            self.write(&text);
        }
    }

    /// A line of the log, above the status area.
    fn say(&mut self, line: Line) {
        let since = self.started.elapsed().as_secs_f64();
        let stamped = Line::new().add(Style::Dim, format!("{since:>w$.1}s  ", w = STAMP - 3)).join(line);
        let width = if self.rich { self.width() } else { usize::MAX };
        let text = self.erase() + &stamped.render(self.colour, width) + "\n";
        self.write(&text);
    }

    /// Moves back over the status area and clears it.
    fn erase(&mut self) -> String {
        match std::mem::take(&mut self.drawn) {
            0 => String::new(),
            lines => format!("\x1b[{lines}A\r\x1b[J"),
        }
    }

    fn width(&self) -> usize {
        let size = match self.target {
            Target::Stdout => rustix::termios::tcgetwinsize(std::io::stdout()),
            Target::Stderr => rustix::termios::tcgetwinsize(std::io::stderr()),
        };
        size.map_or(80, |size| usize::from(size.ws_col).max(40))
    }

    /// A reader that went away does not stop the run.
    fn write(&mut self, text: &str) {
        let _ = match self.target {
            Target::Stdout => write_to(std::io::stdout().lock(), text),
            Target::Stderr => write_to(std::io::stderr().lock(), text),
        };
    }
}

fn write_to(mut output: impl Write, text: &str) -> std::io::Result<()> {
    output.write_all(text.as_bytes())?;
    output.flush()
}

impl Drop for View {
    fn drop(&mut self) {
        self.end();
    }
}

/// Characters of the time before each line of the log.
const STAMP: usize = 9;

const PHASE_STYLES: [Style; 6] =
    [Style::Red, Style::Yellow, Style::Magenta, Style::Cyan, Style::Blue, Style::Green];

/// How long each phase took, in milliseconds; with a width to fill, after a bar of their shares.
fn phase_line(phases: &Phases, width: Option<usize>) -> Line {
    let words = phases.named().map(|(name, ms)| format!(" {name} {ms:.0}"));
    let mut line = Line::new();
    if let Some(width) = width {
        let taken: usize = words.iter().map(String::len).sum();
        let cells = spark::cells(&phases.named().map(|(_, ms)| ms), width.saturating_sub(taken));
        for (cells, style) in cells.into_iter().zip(PHASE_STYLES) {
            line = line.add(style, "█".repeat(cells));
        }
    }
    for (text, style) in words.into_iter().zip(PHASE_STYLES) {
        line = line.add(style, text);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_of_phases_fills_what_the_words_leave() {
        let phases = Phases {
            detect: 5.0,
            quiesce: 4.0,
            fence: 0.0,
            plan: 4.0,
            reshard: 31.0,
            commit: 181.0,
            total: 225.0,
        };
        let words = " detect 5 quiesce 4 fence 0 plan 4 reshard 31 commit 181";
        assert_eq!(phase_line(&phases, None).render(false, usize::MAX), words);
        assert_eq!(phase_line(&phases, Some(71)).render(false, 71), format!("{}{words}", "█".repeat(15)));
        assert_eq!(phase_line(&phases, Some(40)).render(false, 71), words);
    }
}
