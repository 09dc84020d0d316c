//! The tokens of one micro-batch.

/// `samples` texts of `seq_len + 1` tokens each, one after the other. Of each, the first `seq_len` tokens are the
/// inputs, and the last `seq_len` are what should come next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    pub tokens: Vec<u32>,
    pub samples: usize,
    pub seq_len: usize,
    /// The run's seed: with the samples' numbers it decides what dropout drops (RNG).
    pub seed: u64,
    /// The number of the first sample in the run's order; the others follow.
    pub first_sample: u64,
}

/// Why a batch cannot be trained on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    #[error(
        "the batch has {got} tokens, but {samples} samples of {seq_len} tokens and one more need {expected}"
    )]
    Length { got: usize, samples: usize, seq_len: usize, expected: usize },
    #[error(
        "token {token} at position {position} of the batch is outside the vocabulary of {vocab}: \
         was the data made with another tokenizer?"
    )]
    Token { token: u32, position: usize, vocab: usize },
}

impl Batch {
    pub(crate) fn check(&self, vocab: usize) -> Result<(), BatchError> {
        let expected = self.samples.saturating_mul(self.seq_len.saturating_add(1));
        if self.tokens.len() != expected {
            return Err(BatchError::Length {
                got: self.tokens.len(),
                samples: self.samples,
                seq_len: self.seq_len,
                expected,
            });
        }
        match self.tokens.iter().position(|&token| token as usize >= vocab) {
            Some(position) => Err(BatchError::Token { token: self.tokens[position], position, vocab }),
            None => Ok(()),
        }
    }

    pub(crate) fn inputs(&self) -> impl Iterator<Item = u32> {
        self.texts().flat_map(|text| &text[..self.seq_len]).copied()
    }

    pub(crate) fn targets(&self) -> impl Iterator<Item = u32> {
        self.texts().flat_map(|text| &text[1..]).copied()
    }

    fn texts(&self) -> impl Iterator<Item = &[u32]> {
        self.tokens.chunks_exact(self.seq_len + 1)
    }
}
