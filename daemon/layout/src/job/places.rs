//! Which places a job has.

use super::JobSpec;
use crate::Place;

/// A place outside the nominal layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{place} is no place of the job: allowed are {} to {last}", Place::default())]
pub struct NoSuchPlace {
    pub place: Place,
    /// The last place of the job.
    pub last: Place,
}

impl JobSpec {
    /// # Errors
    /// When the job has no such place.
    pub fn expect_place(&self, place: Place) -> Result<(), NoSuchPlace> {
        let parallel = &self.parallel;
        let last = Place::new(parallel.data - 1, parallel.pipeline - 1, parallel.tensor - 1);
        let inside = place.replica <= last.replica && place.stage <= last.stage && place.slot <= last.slot;
        if inside { Ok(()) } else { Err(NoSuchPlace { place, last }) }
    }
}
