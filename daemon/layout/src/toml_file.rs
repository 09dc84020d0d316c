//! From a TOML file's text to plain data, with errors that name the line and the key.

use serde::de::DeserializeOwned;
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Why a file was refused: what, where, and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}: {problem}")]
pub struct FileError {
    pub file: String,
    pub problem: String,
}

/// A value that a file may not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key} {problem}")]
pub struct Invalid {
    /// Such as `model.heads` or `domain[1].nodes[0].gpus`.
    pub key: String,
    /// What is wrong and what is allowed.
    pub problem: String,
}

pub(crate) fn require(holds: bool, key: &str, problem: impl FnOnce() -> String) -> Result<(), Invalid> {
    if holds { Ok(()) } else { Err(Invalid { key: key.to_owned(), problem: problem() }) }
}

impl FileError {
    /// With the line of the value that the file's text may not have.
    pub fn of(text: &str, file: &str, invalid: &Invalid) -> Self {
        let line = span_of(text, &invalid.key).map(|span| line_of(text, span.start));
        Self::on_line(file, line, &invalid.to_string())
    }

    /// `what` may quote the file: line ends and other control characters in it are written as escapes, so the error is one line.
    pub fn on_line(file: &str, line: Option<usize>, what: &str) -> Self {
        let mut problem = line.map_or_else(String::new, |line| format!("line {line}: "));
        for c in what.chars() {
            if c.is_control() { problem.extend(c.escape_default()) } else { problem.push(c) }
        }
        Self { file: file.to_owned(), problem }
    }
}

/// Parses the text of a file. `file` is only its name in errors.
pub fn parse<T: DeserializeOwned>(text: &str, file: &str) -> Result<T, FileError> {
    toml::from_str(text).map_err(|found| {
        let key = found.span().and_then(|span| key_at(text, &span).or_else(|| near(text, &span)));
        let line = found.span().map(|span| line_of(text, span.start));
        FileError::on_line(file, line, &describe(found.message(), key.as_deref()))
    })
}

fn line_of(text: &str, at: usize) -> usize {
    1 + text.bytes().take(at).filter(|byte| *byte == b'\n').count()
}

/// The parser's words on one line, with the key and in the language of our files.
pub fn describe(message: &str, key: Option<&str>) -> String {
    let words = message.split_whitespace().collect::<Vec<_>>().join(" ");
    let words = [
        ("expected u32", "allowed are whole numbers from 0 to 4294967295"),
        ("expected u64", "allowed are whole numbers from 0 to 9223372036854775807"),
        ("expected f64", "allowed are numbers"),
        ("expected a string", "allowed is text in quotes"),
        ("expected a boolean", "allowed are true and false"),
        ("expected a sequence", "allowed is a list"),
        ("expected a table", "allowed is a table"),
        ("expected an array of length 2", "allowed is a list of two numbers"),
        ("expected one of", "allowed are"),
        ("`, expected `", "`, allowed are `"),
        ("unknown field", "unknown key"),
        ("missing field", "missing key"),
        ("unknown variant", "unknown value"),
    ]
    .iter()
    .fold(words, |words, (theirs, ours)| words.replace(theirs, ours));
    // What follows is the name of our type.
    let words = match words.split_once("expected struct ") {
        Some((found, _)) => format!("{found}allowed is a table"),
        None => words,
    };
    match key {
        Some(key) => format!("{key}: {words}"),
        None => words,
    }
}

/// The full name of the deepest key or list entry whose definition is at the place; `None` where the whole file is meant.
fn key_at(text: &str, place: &Range<usize>) -> Option<String> {
    let (root, _) = DeTable::parse_recoverable(text);
    if root.span() == *place {
        return None;
    }
    let mut path = String::new();
    path_to(root.get_ref(), place.start, &mut path);
    (!path.is_empty()).then_some(path)
}

fn path_to(table: &DeTable<'_>, at: usize, path: &mut String) {
    let entry = table.iter().find(|(key, value)| covers(&key.span(), at) || holds(value, at));
    if let Some((key, value)) = entry {
        let dot = if path.is_empty() { "" } else { "." };
        path.push_str(dot);
        path.push_str(key.get_ref());
        path_into(value.get_ref(), at, path);
    }
}

fn path_into(value: &DeValue<'_>, at: usize, path: &mut String) {
    match value {
        DeValue::Table(inner) => path_to(inner, at, path),
        DeValue::Array(entries) => {
            if let Some(index) = entries.iter().position(|entry| holds(entry, at)) {
                path.push_str(&format!("[{index}]"));
                path_into(entries[index].get_ref(), at, path);
            }
        }
        _ => {}
    }
}

fn covers(span: &Range<usize>, at: usize) -> bool {
    span.contains(&at) || span.start == at
}

/// Whether the value, or a key or value somewhere in it, is at the place.
fn holds(value: &Spanned<DeValue<'_>>, at: usize) -> bool {
    let inside = match value.get_ref() {
        DeValue::Table(table) => table.iter().any(|(key, value)| covers(&key.span(), at) || holds(value, at)),
        DeValue::Array(entries) => entries.iter().any(|entry| holds(entry, at)),
        _ => false,
    };
    inside || covers(&value.span(), at)
}

/// The text of a place that is a part of one line.
fn near(text: &str, place: &Range<usize>) -> Option<String> {
    let part = text.get(place.clone())?.trim();
    (!part.is_empty() && part.len() < 40 && part.lines().count() == 1).then(|| format!("at `{part}`"))
}

/// Where the key stands; where it is not written, its table.
fn span_of(text: &str, key: &str) -> Option<Range<usize>> {
    let root = DeTable::parse(text).ok()?;
    let mut parts = key.split(['.', '[']).map(|part| part.trim_end_matches(']'));
    let (name, value) = root.get_ref().get_key_value(parts.next()?)?;
    let (mut found, mut value) = (name.span(), value.get_ref());
    for part in parts {
        let (span, inner) = match value {
            DeValue::Table(table) => match table.get_key_value(part) {
                Some((name, inner)) => (name.span(), inner),
                None => break,
            },
            DeValue::Array(entries) => match part.parse().ok().and_then(|index: usize| entries.get(index)) {
                Some(entry) => (entry.span(), entry),
                None => break,
            },
            _ => break,
        };
        (found, value) = (span, inner.get_ref());
    }
    Some(found)
}
