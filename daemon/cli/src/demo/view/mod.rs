//! The demo as one watches it: a log of what happened and, on a terminal, a status area under it.

mod line;
mod spark;
mod status;

use super::phases::Phases;
use super::record::{FaultKind, Moment, Record};
use super::summary::{bytes_text, degrees_text};
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
    /// What just happened, in a few words.
    headline: String,
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
            headline: String::new(),
            steps: 0,
        };
        if rich {
            view.write("\x1b[?25l");
        }
        view
    }

    /// A new run of so many steps begins.
    pub(crate) fn begin(&mut self, headline: &str, steps: u64) {
        self.steps = steps;
        headline.clone_into(&mut self.headline);
        self.say(Line::new().add(Style::Bold, headline));
    }

    /// Something that the demo itself does.
    pub(crate) fn act(&mut self, text: &str) {
        text.clone_into(&mut self.headline);
        self.say(Line::new().add(Style::Red, text));
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
            Moment::Phase { phase, explanation } => {
                let colon = if explanation.is_empty() { "" } else { ": " };
                self.say(Line::new().add(Style::Dim, format!("job is {phase}{colon}{explanation}")));
            }
            Moment::Layout { epoch, degrees, batch, resume_step, bytes_moved } => {
                self.headline = format!("trains as {} from step {}", degrees_text(degrees), resume_step + 1);
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
                self.headline = format!("{what} at {place}: {ms:.0} ms from the pause to the next step");
                let text = self.headline.clone();
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
            FaultKind::GpuLost => "the loss",
        };
        self.headline = format!("recovered from {what} in {:.0} ms", phases.total);
        let seen = fault.incident.as_ref().map_or(String::new(), |incident| {
            format!(" ({}; first seen by {})", incident.signal, incident.first_reporter)
        });
        self.say(Line::new().add(Style::Green, format!("{}{seen}", self.headline)));
        let mut line = Line::new();
        if self.rich {
            let width = self.width().saturating_sub(68).clamp(12, 40);
            for (cells, style) in phase_cells(&phases, width) {
                line = line.add(style, "█".repeat(cells));
            }
        }
        for ((name, ms), style) in phases.named().into_iter().zip(PHASE_STYLES) {
            line = line.add(style, format!(" {name} {ms:.0}"));
        }
        self.say(line);
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
        let lines = status::lines(record, self.steps, &self.headline, self.started.elapsed(), self.width());
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
        let stamped = Line::new().add(Style::Dim, format!("{since:6.1}s  ")).join(line);
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

const PHASE_STYLES: [Style; 6] =
    [Style::Red, Style::Yellow, Style::Magenta, Style::Cyan, Style::Blue, Style::Green];

/// Each phase's share of a bar, in cells.
fn phase_cells(phases: &Phases, width: usize) -> Vec<(usize, Style)> {
    let lengths = phases.named().map(|(_, ms)| ms);
    spark::cells(&lengths, width).into_iter().zip(PHASE_STYLES).collect()
}
