//! The training data: where its tokens come from, and which samples a step takes.
//!
//! Files become one stream of tokens, whatever they are: text whose bytes are tokens, token numbers, or text and a tokenizer
//! that makes such a file of token numbers of it, once for a node ([`cache`]). The stream is cut into windows, and their order is a function of
//! the seed and a sample's number alone ([`order`]): the committed step is the only cursor there is.

pub mod cache;
mod corpus;
mod map;
pub mod order;

pub use corpus::{Corpus, CorpusError};
