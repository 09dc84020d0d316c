//! Matrices in someone else's slice, which can be cut into pieces for several threads.
#![allow(unsafe_code)]

use std::marker::PhantomData;

/// A matrix to be read: element `(i, j)` lies at `i * row_stride + j * col_stride`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View<'a, T> {
    pub(super) data: *const T,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
    /// A product sees the elements rounded to bf16.
    pub(super) rounded: bool,
    borrowed: PhantomData<&'a [T]>,
}

/// A matrix to be written, row-major.
#[derive(Debug)]
pub(crate) struct ViewMut<'a, T> {
    pub(super) data: *mut T,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) stride: usize,
    borrowed: PhantomData<&'a mut [T]>,
}

// SAFETY: a `View` is a shared borrow of its elements, as a `&[T]` is. No other element of the slice is ever touched.
unsafe impl<T: Sync> Send for View<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for View<'_, T> {}
// SAFETY: a `ViewMut` is an exclusive borrow of its elements, as a `&mut [T]` is; pieces of one have no element in common.
unsafe impl<T: Send> Send for ViewMut<'_, T> {}

impl<'a, T> View<'a, T> {
    /// Row-major without gaps.
    pub(crate) fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows `stride` elements apart.
    ///
    /// # Panics
    /// If the matrix does not fit the slice.
    pub(crate) fn strided(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        assert_fits(data.len(), rows, cols, stride);
        Self {
            data: data.as_ptr(),
            rows,
            cols,
            row_stride: stride,
            col_stride: 1,
            rounded: false,
            borrowed: PhantomData,
        }
    }

    /// The same matrix; to a product that has it on its right, rounded to bf16 if `rounded`.
    pub(crate) fn rounded(self, rounded: bool) -> Self {
        Self { rounded, ..self }
    }

    /// The transpose; nothing is copied.
    pub(crate) fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    /// The `rows` x `cols` matrix whose first element is `(row, col)` of this one.
    ///
    /// # Panics
    /// If it reaches beyond this one.
    pub(crate) fn piece(self, row: usize, rows: usize, col: usize, cols: usize) -> Self {
        assert!(row + rows <= self.rows && col + cols <= self.cols);
        if rows == 0 || cols == 0 {
            return Self { rows, cols, ..self };
        }
        // SAFETY: `(row, col)` is an element, as the assertion says.
        let data = unsafe { self.data.add(row * self.row_stride + col * self.col_stride) };
        Self { data, rows, cols, ..self }
    }

    /// # Panics
    /// If there is no such row, or the matrix is a transpose.
    pub(crate) fn row(&self, row: usize) -> &'a [T] {
        assert!(row < self.rows && (self.col_stride == 1 || self.cols <= 1));
        // SAFETY: the row's elements lie side by side in the borrowed slice.
        unsafe { std::slice::from_raw_parts(self.data.add(row * self.row_stride), self.cols) }
    }
}

impl<'a, T> ViewMut<'a, T> {
    /// Row-major without gaps.
    pub(crate) fn new(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows `stride` elements apart.
    ///
    /// # Panics
    /// If the matrix does not fit the slice, or its rows overlap.
    pub(crate) fn strided(data: &'a mut [T], rows: usize, cols: usize, stride: usize) -> Self {
        assert_fits(data.len(), rows, cols, stride);
        assert!(stride >= cols, "rows of {cols} overlap at stride {stride}");
        Self { data: data.as_mut_ptr(), rows, cols, stride, borrowed: PhantomData }
    }

    /// To be read for a while.
    pub(crate) fn view(&self) -> View<'_, T> {
        View {
            data: self.data,
            rows: self.rows,
            cols: self.cols,
            row_stride: self.stride,
            col_stride: 1,
            rounded: false,
            borrowed: PhantomData,
        }
    }

    /// The same matrix for a while.
    pub(crate) fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { borrowed: PhantomData, ..*self }
    }

    /// # Panics
    /// If there is no such row.
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows);
        // SAFETY: the row's elements lie side by side in the borrowed slice.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.stride), self.cols) }
    }

    /// The first `cols` columns, and the others.
    ///
    /// # Panics
    /// If there are fewer.
    pub(crate) fn split_cols(self, cols: usize) -> (Self, Self) {
        assert!(cols <= self.cols);
        // SAFETY: without rows the pointer stays; otherwise it moves inside the first row, or to its end.
        let right = if self.rows == 0 { self.data } else { unsafe { self.data.add(cols) } };
        (Self { cols, ..self }, Self { data: right, cols: self.cols - cols, ..self })
    }

    /// Cuts the matrix into pieces of `rows` x `cols` (smaller at the lower and the right edge), row by row.
    ///
    /// # Panics
    /// If one of the two is 0.
    pub(crate) fn pieces(self, rows: usize, cols: usize) -> impl Iterator<Item = Self> + Send + use<'a, T>
    where
        T: Send,
    {
        assert!(rows > 0 && cols > 0);
        let whole = Whole(self);
        (0..whole.0.rows).step_by(rows).flat_map(move |row| {
            let whole = whole.again();
            (0..whole.0.cols).step_by(cols).map(move |col| {
                let whole = &whole.0;
                Self {
                    // SAFETY: `(row, col)` is an element. The ranges make each pair once, and pieces do not overlap.
                    data: unsafe { whole.data.add(row * whole.stride + col) },
                    rows: rows.min(whole.rows - row),
                    cols: cols.min(whole.cols - col),
                    stride: whole.stride,
                    borrowed: PhantomData,
                }
            })
        })
    }
}

/// A matrix that is only cut up, no longer used as a whole.
struct Whole<'a, T>(ViewMut<'a, T>);

impl<T> Whole<'_, T> {
    fn again(&self) -> Self {
        Self(ViewMut { borrowed: PhantomData, ..self.0 })
    }
}

/// Every element of a `rows` x `cols` matrix lies below `len`, and every offset fits an `isize`.
fn assert_fits(len: usize, rows: usize, cols: usize, stride: usize) {
    if rows == 0 || cols == 0 {
        return;
    }
    let last = (rows - 1).checked_mul(stride).and_then(|start| start.checked_add(cols - 1));
    assert!(
        last.is_some_and(|last| last < len) && isize::try_from(stride).is_ok(),
        "a matrix of {rows} x {cols}, stride {stride}, in a slice of {len}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "in a slice of 5")]
    fn a_short_slice_is_refused() {
        View::new(&[0.0; 5], 2, 3);
    }

    #[test]
    fn pieces_cover_a_matrix_once_and_leave_the_gaps() {
        for (rows, cols) in [(1, 1), (2, 3), (5, 7), (4, 2), (9, 9)] {
            let mut data = vec![0; 5 * 9 - 2];
            for (number, mut piece) in ViewMut::strided(&mut data, 5, 7, 9).pieces(rows, cols).enumerate() {
                for row in 0..piece.rows {
                    piece.row(row).iter_mut().for_each(|element| *element += number + 1);
                }
            }
            for (place, &element) in data.iter().enumerate() {
                let (row, col) = (place / 9, place % 9);
                let across = 7_usize.div_ceil(cols);
                let expected = if col < 7 { row / rows * across + col / cols + 1 } else { 0 };
                assert_eq!(element, expected, "({row}, {col}) in pieces of {rows} x {cols}");
            }
        }
        let mut none: [f32; 0] = [];
        assert_eq!(ViewMut::new(&mut none, 0, 4).pieces(2, 2).count(), 0);
        assert_eq!(ViewMut::new(&mut none, 4, 0).pieces(2, 2).count(), 0);
    }

    #[test]
    fn rows_of_pieces_and_transposes() {
        let data: Vec<usize> = (0..20).collect();
        let view = View::new(&data, 4, 5);
        assert_eq!(view.piece(1, 2, 2, 3).row(1), [12, 13, 14]);
        assert_eq!(view.t().piece(2, 2, 1, 3).t().row(2), [17, 18]);
        let mut data = data;
        let (mut left, mut right) = ViewMut::new(&mut data, 4, 5).split_cols(2);
        assert_eq!((left.row(3).to_vec(), right.row(3).to_vec()), (vec![15, 16], vec![17, 18, 19]));
        assert_eq!((left.cols, right.cols, right.rows), (2, 3, 4));
    }
}
