//! From a job file's text to a job, with errors that name the line and the key.

use super::{JobError, JobSpec};
use std::ops::Range;
use toml::de::{DeTable, DeValue};

impl JobSpec {
    /// Parses and validates a job file. `file` is only its name in errors.
    pub fn parse(text: &str, file: &str) -> Result<Self, JobError> {
        let error = |line: Option<usize>, what: String| JobError {
            file: file.to_owned(),
            problem: match line {
                Some(line) => format!("line {line}: {what}"),
                None => what,
            },
        };
        let job: Self = toml::from_str(text).map_err(|found| {
            let key = found.span().and_then(|span| key_at(text, &span).or_else(|| near(text, &span)));
            let line = found.span().map(|span| line_of(text, span.start));
            error(line, describe(found.message(), key.as_deref()))
        })?;
        job.validate().map_err(|found| {
            let line = span_of(text, found.key).map(|span| line_of(text, span.start));
            error(line, found.to_string())
        })?;
        Ok(job)
    }

    /// The job as a job file, every default written out. Parses back to the same job, if that is valid.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("TOML can express every valid job")
    }
}

fn line_of(text: &str, at: usize) -> usize {
    1 + text.bytes().take(at).filter(|byte| *byte == b'\n').count()
}

/// The parser's words on one line, with the key and in the language of job files.
fn describe(message: &str, key: Option<&str>) -> String {
    let words = message.split_whitespace().collect::<Vec<_>>().join(" ");
    let words = [
        ("expected u32", "allowed are whole numbers from 0 to 4294967295"),
        ("expected u64", "allowed are whole numbers from 0 to 9223372036854775807"),
        ("expected f64", "allowed are numbers"),
        ("expected a string", "allowed is text in quotes"),
        ("expected a boolean", "allowed are true and false"),
        ("expected a sequence", "allowed is a list"),
        ("expected an array of length 2", "allowed is a list of two numbers"),
        ("expected one of", "allowed are"),
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

/// The full name of the deepest key whose definition is at the place; `None` where the whole file is meant.
fn key_at(text: &str, place: &Range<usize>) -> Option<String> {
    let (root, _) = DeTable::parse_recoverable(text);
    if root.span() == *place {
        return None;
    }
    let at = place.start;
    let mut path: Vec<&str> = Vec::new();
    let mut table = root.get_ref();
    loop {
        let covers = |span: Range<usize>| span.contains(&at) || span.start == at;
        let inside = |value: &DeValue<'_>| matches!(value, DeValue::Table(table) if holds(table, at));
        let entry = table
            .iter()
            .find(|(key, value)| covers(key.span()) || covers(value.span()) || inside(value.get_ref()));
        let Some((key, value)) = entry else { break };
        path.push(key.get_ref());
        match value.get_ref() {
            DeValue::Table(inner) => table = inner,
            _ => break,
        }
    }
    (!path.is_empty()).then(|| path.join("."))
}

/// The text of a place that is a part of one line.
fn near(text: &str, place: &Range<usize>) -> Option<String> {
    let part = text.get(place.clone())?.trim();
    (!part.is_empty() && part.len() < 40 && part.lines().count() == 1).then(|| format!("at `{part}`"))
}

/// Whether a key or value somewhere in the table is at the place.
fn holds(table: &DeTable<'_>, at: usize) -> bool {
    table.iter().any(|(key, value)| {
        let inner = matches!(value.get_ref(), DeValue::Table(table) if holds(table, at));
        inner || key.span().contains(&at) || value.span().contains(&at)
    })
}

/// Where the key stands; where it is not written, its table.
fn span_of(text: &str, key: &str) -> Option<Range<usize>> {
    let root = DeTable::parse(text).ok()?;
    let mut table = root.get_ref();
    let mut found = None;
    for part in key.split('.') {
        let Some((key, value)) = table.iter().find(|(key, _)| key.get_ref() == part) else {
            break;
        };
        found = Some(key.span());
        match value.get_ref() {
            DeValue::Table(inner) => table = inner,
            _ => break,
        }
    }
    found
}
