//! The secrets that let a worker join an epoch.

use reknit_engine::JobName;
use reknit_layout::Epoch;
use std::collections::BTreeMap;
use std::fmt;

/// 32 random bytes per (job, epoch), made at first use and forgotten when a newer epoch is prepared.
///
/// They live in memory only and are told to an epoch's members alone: a zombie never learns the next one.
#[derive(Default)]
pub struct Tickets {
    newest: BTreeMap<JobName, (Epoch, [u8; 32])>,
}

impl Tickets {
    /// The ticket of `epoch`. An epoch older than the newest has none any more.
    pub fn of(&mut self, job: &JobName, epoch: Epoch) -> Result<Option<[u8; 32]>, getrandom::Error> {
        match self.newest.get(job) {
            Some((newest, ticket)) if *newest == epoch => return Ok(Some(*ticket)),
            Some((newest, _)) if *newest > epoch => return Ok(None),
            Some(_) | None => {}
        }
        let mut ticket = [0; 32];
        getrandom::fill(&mut ticket)?;
        self.newest.insert(job.clone(), (epoch, ticket));
        Ok(Some(ticket))
    }
}

impl fmt::Debug for Tickets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let epochs = self.newest.iter().map(|(job, (epoch, _))| (job, epoch));
        f.debug_map().entries(epochs).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_ticket_per_epoch_and_none_for_a_closed_one() {
        let mut tickets = Tickets::default();
        let job = JobName("j".to_owned());
        let first = tickets.of(&job, Epoch(1)).unwrap().unwrap();
        assert_eq!(tickets.of(&job, Epoch(1)).unwrap(), Some(first));
        let second = tickets.of(&job, Epoch(2)).unwrap().unwrap();
        assert_ne!(first, second);
        assert_eq!(tickets.of(&job, Epoch(1)).unwrap(), None);
        let other = tickets.of(&JobName("k".to_owned()), Epoch(1)).unwrap();
        assert_ne!(other, Some(first));
        assert_eq!(format!("{tickets:?}"), r#"{JobName("j"): Epoch(2), JobName("k"): Epoch(1)}"#);
    }
}
