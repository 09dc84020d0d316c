//! One line of text in colours, cut to the width of the screen.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    Plain,
    Dim,
    Bold,
    Red,
    Green,
    Yellow,
    Blue,
    Magenta,
    Cyan,
}

impl Style {
    /// The number in the escape sequence (ECMA-48, SGR).
    fn code(self) -> u8 {
        match self {
            Self::Plain => 0,
            Self::Bold => 1,
            Self::Dim => 2,
            Self::Red => 31,
            Self::Green => 32,
            Self::Yellow => 33,
            Self::Blue => 34,
            Self::Magenta => 35,
            Self::Cyan => 36,
        }
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct Line(Vec<(Style, String)>);

impl Line {
    pub(super) fn new() -> Self {
        Self::default()
    }

    pub(super) fn add(mut self, style: Style, text: impl Into<String>) -> Self {
        self.0.push((style, text.into()));
        self
    }

    pub(super) fn join(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// At most `width` characters. What does not fit is cut after a word, and an ellipsis says so.
    ///
    /// Control characters are left out: text from logs cannot steer the terminal.
    pub(super) fn render(&self, colour: bool, width: usize) -> String {
        let clean = |text: &str| text.chars().filter(|c| !c.is_control()).collect::<String>();
        let parts: Vec<_> = self.0.iter().map(|(style, text)| (*style, clean(text))).collect();
        let whole: String = parts.iter().map(|(_, text)| text.as_str()).collect();
        let (mut left, ellipsis) = fitting(whole.trim_end(), width);
        let mut out = String::new();
        for (style, text) in &parts {
            let mut cut: String = text.chars().take(left).collect();
            let taken = cut.chars().count();
            if taken == left && left > 0 {
                cut.push_str(ellipsis);
            }
            left -= taken;
            if colour && *style != Style::Plain && !cut.is_empty() {
                out.push_str(&format!("\x1b[{}m{cut}\x1b[0m", style.code()));
            } else {
                out.push_str(&cut);
            }
        }
        out
    }
}

/// How many characters of `text` to show, and what to show after them.
fn fitting(text: &str, width: usize) -> (usize, &'static str) {
    let length = text.chars().count();
    if length <= width {
        return (length, "");
    }
    let room = width.saturating_sub(1);
    // The character after the last one that has room: when it is a space, a word ends just before.
    let head: Vec<char> = text.chars().take(room + 1).collect();
    let word_end = (1..head.len()).rev().find(|&i| head[i] == ' ' && head[i - 1] != ' ');
    (word_end.unwrap_or(room), "…")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cut_after_a_word_without_counting_colours() {
        let line = Line::new().add(Style::Red, "two of ").add(Style::Plain, "them will fail");
        assert_eq!(line.render(false, 21), "two of them will fail");
        assert_eq!(line.render(false, 20), "two of them will…");
        assert_eq!(line.render(false, 17), "two of them will…");
        assert_eq!(line.render(false, 16), "two of them…");
        assert_eq!(line.render(true, 16), "\x1b[31mtwo of \x1b[0mthem…");
        assert_eq!(line.render(true, 8), "\x1b[31mtwo of…\x1b[0m");
    }

    #[test]
    fn a_word_that_does_not_fit_is_cut_all_the_same() {
        assert_eq!(Line::new().add(Style::Plain, "████████").render(false, 4), "███…");
    }

    #[test]
    fn control_characters_are_left_out() {
        assert_eq!(Line::new().add(Style::Plain, "a\x1b[2J\nb").render(false, 80), "a[2Jb");
    }
}
