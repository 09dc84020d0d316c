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

    /// Control characters are left out: text from logs cannot steer the terminal.
    pub(super) fn render(&self, colour: bool, width: usize) -> String {
        let mut left = width;
        let mut out = String::new();
        for (style, text) in &self.0 {
            let cut: String = text.chars().filter(|c| !c.is_control()).take(left).collect();
            left -= cut.chars().count();
            if colour && *style != Style::Plain && !cut.is_empty() {
                out.push_str(&format!("\x1b[{}m{cut}\x1b[0m", style.code()));
            } else {
                out.push_str(&cut);
            }
        }
        out.trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cut_to_the_width_without_counting_colours() {
        let line = Line::new().add(Style::Red, "abc").add(Style::Plain, "def");
        assert_eq!(line.render(false, 4), "abcd");
        assert_eq!(line.render(true, 4), "\x1b[31mabc\x1b[0md");
    }

    #[test]
    fn control_characters_are_left_out() {
        assert_eq!(Line::new().add(Style::Plain, "a\x1b[2J\nb").render(false, 80), "a[2Jb");
    }
}
