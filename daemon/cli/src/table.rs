//! Columns for people.

/// Rows, mostly under a header, each column as wide as its widest cell.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(header: impl IntoIterator<Item: Into<String>>) -> Self {
        Self { rows: vec![header.into_iter().map(Into::into).collect()] }
    }

    pub(crate) fn plain() -> Self {
        Self { rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: impl Into<Vec<String>>) {
        self.rows.push(cells.into());
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<_> = (0..columns).map(width).collect();
        let line = |row: &Vec<String>| {
            let cells = row.iter().zip(&widths);
            let padded: Vec<_> = cells.map(|(cell, &width)| format!("{cell:<width$}")).collect();
            padded.join("  ").trim_end().to_owned()
        };
        self.rows.iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(["NAME", "PHASE"]);
        table.row(["a-long-name".to_owned(), "Running".to_owned()]);
        table.row(["b".to_owned(), String::new()]);
        assert_eq!(table.lines(), ["NAME         PHASE", "a-long-name  Running", "b"]);
    }
}
