//! The outbox on disk, so that neither a daemon that is away nor the agent's own death loses a transition.
//!
//! An append-only file of JSON lines: what was pushed and what was acknowledged. A line is written before what it
//! tells of is sent. A power cut may cost the newest lines; what they told of is found again by looking.

use crate::files;
use crate::outbox::Outbox;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tracing::{info, warn};

/// The file is written anew once it has so many lines more than twice what waits.
const SLACK: usize = 64;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line<T> {
    /// Numbers below this were given.
    Next(u64),
    Push {
        number: u64,
        item: T,
    },
    Ack(u64),
}

/// An [`Outbox`] that outlives the agent.
#[derive(Debug)]
pub(crate) struct Spool<T> {
    path: PathBuf,
    outbox: Outbox<T>,
    /// `None` while the file cannot be written: everything goes on in memory.
    file: Option<File>,
    lines: usize,
    dropped: u64,
    /// Every number below this was given, or never will be.
    given: u64,
}

impl<T: Serialize + DeserializeOwned> Spool<T> {
    /// Goes on from what the file holds. `first`: the least number, if the file knows of none.
    pub(crate) fn open(path: &Path, first: u64) -> Self {
        let mut outbox = Outbox::new(0);
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(e) => {
                warn!(path = %path.display(), %e, "cannot read what was not acknowledged before");
                Vec::new()
            }
        };
        let unreadable = load(&text, &mut outbox);
        if unreadable > 0 {
            warn!(path = %path.display(), unreadable, "some lines cannot be read and are left out");
        }
        let given = outbox.next();
        outbox.not_below(first);
        let mut spool = Self { path: path.to_owned(), outbox, file: None, lines: 0, dropped: 0, given };
        // Also ends a line that was torn.
        if let Err(e) = spool.rewrite() {
            spool.say_unwritable(&e);
        }
        spool
    }

    /// Written down when it returns, unless the file cannot be written.
    pub(crate) fn push(&mut self, item: T) -> u64 {
        let number = self.outbox.next();
        let line = Line::Push { number, item };
        self.append(&line);
        if let Line::Push { number, item } = line
            && let Some(oldest) = self.outbox.put(number, item)
        {
            self.dropped += 1;
            // Once at first, then now and then.
            if self.dropped.is_power_of_two() {
                let dropped = self.dropped;
                warn!(
                    oldest,
                    dropped, "the daemon has acknowledged nothing for long: the oldest are dropped"
                );
            }
        }
        self.given = number + 1;
        self.compact();
        number
    }

    /// Whether this number was given to an item, as far as the file knows. Asked at a start: the agent may have died
    /// just before.
    pub(crate) fn has_given(&self, number: u64) -> bool {
        number < self.given
    }

    pub(crate) fn acknowledge(&mut self, number: u64) {
        if self.outbox.acknowledge(number) {
            self.append(&Line::Ack(number));
            self.compact();
        }
    }

    /// Tries to write again, if that failed before.
    pub(crate) fn retry(&mut self) {
        if self.file.is_none() && self.rewrite().is_ok() {
            info!(path = %self.path.display(), "transitions are recorded again");
        }
    }

    /// The next item's number.
    pub(crate) fn next(&self) -> u64 {
        self.outbox.next()
    }

    /// Oldest first.
    pub(crate) fn waiting(&self) -> impl ExactSizeIterator<Item = &(u64, T)> {
        self.outbox.waiting()
    }

    fn append(&mut self, line: &Line<T>) {
        let Some(file) = &mut self.file else {
            return;
        };
        let written = encode(line).and_then(|text| file.write_all(&text));
        match written {
            Ok(()) => self.lines += 1,
            Err(e) => self.say_unwritable(&e),
        }
    }

    fn say_unwritable(&mut self, e: &io::Error) {
        self.file = None;
        let path = self.path.display();
        warn!(%path, %e, "cannot record transitions: they wait in memory, and are lost if the agent dies now");
    }

    fn compact(&mut self) {
        if self.file.is_some()
            && self.lines > SLACK + 2 * self.outbox.waiting().len()
            && let Err(e) = self.rewrite()
        {
            self.say_unwritable(&e);
        }
    }

    /// Replaces the file by what matters still.
    fn rewrite(&mut self) -> io::Result<()> {
        let mut text = encode::<T>(&Line::Next(self.outbox.next()))?;
        for (number, item) in self.outbox.waiting() {
            text.extend(encode(&Line::Push { number: *number, item })?);
        }
        files::replace(&self.path, &text)?;
        self.file = Some(OpenOptions::new().append(true).open(&self.path)?);
        self.lines = 1 + self.outbox.waiting().len();
        Ok(())
    }
}

fn encode<T: Serialize>(line: &Line<T>) -> io::Result<Vec<u8>> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    Ok(text)
}

/// Returns how many lines make no sense; the last one may have been torn by the agent's death.
fn load<T: DeserializeOwned>(text: &[u8], outbox: &mut Outbox<T>) -> usize {
    let mut unreadable = 0;
    for line in text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        match serde_json::from_slice(line) {
            Ok(Line::Next(number)) => outbox.not_below(number),
            Ok(Line::Push { number, item }) => drop(outbox.put(number, item)),
            Ok(Line::Ack(number)) => {
                outbox.not_below(number + 1);
                outbox.acknowledge(number);
            }
            Err(_) => unreadable += 1,
        }
    }
    unreadable
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbox::KEPT;

    fn waiting(spool: &Spool<String>) -> Vec<(u64, String)> {
        spool.waiting().cloned().collect()
    }

    fn item(number: u64) -> (u64, String) {
        (number, format!("item {number}"))
    }

    #[test]
    fn goes_on_where_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("spool.jsonl");
        let mut spool = Spool::open(&path, 100);
        for number in 100..103 {
            assert_eq!(spool.push(item(number).1), number);
        }
        spool.acknowledge(101);
        spool.acknowledge(101);
        // No clean end: the agent is killed.
        std::mem::forget(spool);
        let mut spool: Spool<String> = Spool::open(&path, 5);
        assert_eq!(waiting(&spool), [item(100), item(102)]);
        assert!(spool.has_given(102) && !spool.has_given(103));
        assert_eq!(spool.push("x".to_owned()), 103, "numbers grow on, though the clock went back");
        for number in [100, 102, 103] {
            spool.acknowledge(number);
        }
        drop(spool);
        let spool: Spool<String> = Spool::open(&path, 5);
        assert_eq!((waiting(&spool), spool.next()), (Vec::new(), 104));
    }

    #[test]
    fn tells_which_numbers_were_given_though_the_clock_is_ahead() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("spool.jsonl");
        let mut spool = Spool::open(&path, 100);
        assert!(!spool.has_given(100));
        spool.push(item(100).1);
        assert!(spool.has_given(100) && !spool.has_given(101));
        drop(spool);
        let spool: Spool<String> = Spool::open(&path, 5_000);
        assert!(spool.has_given(100) && !spool.has_given(101));
        assert_eq!(spool.next(), 5_000);
    }

    #[test]
    fn a_torn_last_line_costs_itself_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("spool.jsonl");
        let mut spool = Spool::open(&path, 1);
        spool.push(item(1).1);
        spool.push(item(2).1);
        drop(spool);
        let whole = fs::read(&path).unwrap();
        for cut in 1..whole.len() {
            fs::write(&path, &whole[..cut]).unwrap();
            let mut spool = Spool::open(&path, 1);
            let kept = waiting(&spool).len() as u64;
            assert!(kept <= 2);
            let number = spool.push("after".to_owned());
            drop(spool);
            let again: Spool<String> = Spool::open(&path, 1);
            assert_eq!(again.waiting().last(), Some(&(number, "after".to_owned())), "cut at {cut}");
        }
    }

    #[test]
    fn is_bounded_in_memory_and_on_disk() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("spool.jsonl");
        let mut spool = Spool::open(&path, 1);
        for number in 1..=3 * KEPT as u64 {
            spool.push(item(number).1);
        }
        assert_eq!((spool.waiting().len(), spool.dropped), (KEPT, 2 * KEPT as u64));
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines <= 2 * KEPT + SLACK + 1, "{lines}");
        let numbers: Vec<_> = spool.waiting().map(|(number, _)| *number).collect();
        for number in numbers {
            spool.acknowledge(number);
        }
        assert!(fs::read_to_string(&path).unwrap().lines().count() <= SLACK + 1);
        let again: Spool<String> = Spool::open(&path, 1);
        assert_eq!((again.waiting().len(), again.next()), (0, 3 * KEPT as u64 + 1));
    }

    #[test]
    fn goes_on_in_memory_on_a_full_disk_and_recovers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("spool.jsonl");
        let mut spool = Spool::open(&path, 1);
        // The kernel's own full disk.
        spool.file = Some(OpenOptions::new().append(true).open("/dev/full").unwrap());
        let blocker = path.with_extension("new");
        fs::create_dir(&blocker).unwrap();
        assert_eq!(spool.push(item(1).1), 1);
        assert!(spool.file.is_none(), "nothing was noticed");
        spool.retry();
        assert!(spool.file.is_none());
        assert_eq!(spool.push(item(2).1), 2);
        spool.acknowledge(1);
        assert_eq!(waiting(&spool), [item(2)]);
        fs::remove_dir(&blocker).unwrap();
        spool.retry();
        spool.push(item(3).1);
        drop(spool);
        let again: Spool<String> = Spool::open(&path, 1);
        assert_eq!(waiting(&again), [item(2), item(3)]);
    }
}
