//! Seconds over two sizes of work.

/// The longest axis of a table: what a calibration measures is far below it.
const MAX_AXIS: usize = 256;

/// Along which axes more work never takes less time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rise {
    /// Along both.
    Both,
    /// Along the rows only; between columns and beyond them nothing is promised, and the last column stands for all behind it.
    Rows,
}

/// Measured seconds over two axes, linear in between.
///
/// ```text
///              columns[0]   columns[1] ...
/// rows[0]      seconds[0][0] ...
/// rows[1]      ...
/// ```
///
/// Below the first row or column the first one stands. Beyond the last one it goes on as steeply as it came, never less steeply for more
/// of the other kind of work, so the whole plane rises where the table does.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    rows: Vec<f64>,
    columns: Vec<f64>,
    seconds: Vec<Vec<f64>>,
    /// Seconds a unit beyond the last row, by column.
    row_slopes: Vec<f64>,
    /// Seconds a unit beyond the last column, by row.
    column_slopes: Vec<f64>,
}

impl Table {
    /// Makes a table of measurements, and takes out what noise made fall.
    ///
    /// # Errors
    /// In words, if the axes do not rise, or the seconds do not fit them or are no times.
    pub fn new(
        rows: Vec<f64>,
        columns: Vec<f64>,
        mut seconds: Vec<Vec<f64>>,
        rise: Rise,
    ) -> Result<Self, String> {
        check_axis("the rows", &rows)?;
        check_axis("the columns", &columns)?;
        if seconds.len() != rows.len() {
            return Err(format!("has {} rows of seconds, must have {}", seconds.len(), rows.len()));
        }
        for (row, values) in rows.iter().zip(&seconds) {
            if values.len() != columns.len() {
                return Err(format!("has {} seconds at {row}, must have {}", values.len(), columns.len()));
            }
            if let Some(wrong) = values.iter().find(|value| !(value.is_finite() && **value >= 0.0)) {
                return Err(format!("says {wrong} at {row}, which is no time"));
            }
        }
        for row in 0..rows.len() {
            for column in 0..columns.len() {
                let above = if row > 0 { seconds[row - 1][column] } else { 0.0 };
                let before = if column > 0 && rise == Rise::Both { seconds[row][column - 1] } else { 0.0 };
                seconds[row][column] = seconds[row][column].max(above).max(before);
            }
        }
        let row_slopes = slopes((0..columns.len()).map(|column| {
            let values: Vec<f64> = seconds.iter().map(|row| row[column]).collect();
            last_slope(&rows, &values)
        }));
        let column_slopes = match rise {
            Rise::Both => slopes(seconds.iter().map(|values| last_slope(&columns, values))),
            Rise::Rows => vec![0.0; rows.len()],
        };
        Ok(Self { rows, columns, seconds, row_slopes, column_slopes })
    }

    /// Returns the sizes that were measured, rows first.
    #[must_use]
    pub fn axes(&self) -> (&[f64], &[f64]) {
        (&self.rows, &self.columns)
    }

    /// Returns the seconds by row.
    #[must_use]
    pub fn seconds(&self) -> &[Vec<f64>] {
        &self.seconds
    }

    /// Returns the seconds at a place.
    #[must_use]
    pub fn at(&self, row: f64, column: f64) -> f64 {
        let (r, c) = (Place::of(&self.rows, row), Place::of(&self.columns, column));
        let within = r.between(|row| c.between(|column| self.seconds[row][column]));
        within
            + r.beyond * c.between(|column| self.row_slopes[column])
            + c.beyond * r.between(|row| self.column_slopes[row])
    }
}

/// Where a value stands on an axis.
struct Place {
    /// The last point not behind it, and the next one.
    low: usize,
    high: usize,
    /// How far it is from one to the other, in `[0, 1]`.
    share: f64,
    /// How far it is behind the last point.
    beyond: f64,
}

impl Place {
    fn of(axis: &[f64], value: f64) -> Self {
        let last = axis.len() - 1;
        let high = axis.partition_point(|point| *point <= value);
        if high == 0 {
            return Self { low: 0, high: 0, share: 0.0, beyond: 0.0 };
        }
        if high > last {
            return Self { low: last, high: last, share: 0.0, beyond: value - axis[last] };
        }
        let low = high - 1;
        let share = (value - axis[low]) / (axis[high] - axis[low]);
        Self { low, high, share, beyond: 0.0 }
    }

    fn between(&self, at: impl Fn(usize) -> f64) -> f64 {
        if self.low == self.high {
            return at(self.low);
        }
        at(self.low) * (1.0 - self.share) + at(self.high) * self.share
    }
}

fn check_axis(name: &str, axis: &[f64]) -> Result<(), String> {
    if axis.is_empty() || axis.len() > MAX_AXIS {
        return Err(format!("has {} points along {name}, must have 1 to {MAX_AXIS}", axis.len()));
    }
    if !axis.iter().all(|point| point.is_finite() && *point >= 0.0) {
        return Err(format!("has a point along {name} that is no size"));
    }
    if !axis.windows(2).all(|pair| pair[0] < pair[1]) {
        return Err(format!("does not rise along {name}"));
    }
    Ok(())
}

fn last_slope(axis: &[f64], values: &[f64]) -> f64 {
    match axis.len() {
        0 | 1 => 0.0,
        n => (values[n - 1] - values[n - 2]).max(0.0) / (axis[n - 1] - axis[n - 2]),
    }
}

/// Makes slopes that do not fall: more of the one kind of work does not make the other cheaper.
fn slopes(slopes: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut steepest = 0.0_f64;
    slopes
        .map(|slope| {
            steepest = steepest.max(slope);
            steepest
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table(seconds: Vec<Vec<f64>>, rise: Rise) -> Table {
        Table::new(vec![1.0, 10.0, 100.0], vec![0.0, 1000.0], seconds, rise).expect("fits")
    }

    #[test]
    fn measured_points_are_kept_and_what_lies_between_is_linear() {
        let table = table(vec![vec![1.0, 2.0], vec![2.0, 4.0], vec![11.0, 40.0]], Rise::Both);
        for (row, column, expected) in [
            (1.0, 0.0, 1.0),
            (100.0, 1000.0, 40.0),
            (5.5, 0.0, 1.5),
            (10.0, 500.0, 3.0),
            (55.0, 500.0, (2.0 + 11.0 + 4.0 + 40.0) / 4.0),
            // Below the first point, the first point.
            (0.0, -1.0, 1.0),
            // Beyond the last one, as steeply as it came.
            (110.0, 0.0, 12.0),
            (110.0, 1000.0, 44.0),
            (1.0, 2000.0, 3.0),
            (100.0, 2000.0, 69.0),
        ] {
            assert!((table.at(row, column) - expected).abs() < 1e-9, "{row} {column}");
        }
    }

    #[test]
    fn noise_does_not_make_it_fall() {
        let noisy = table(vec![vec![2.0, 1.0], vec![1.0, 3.0], vec![4.0, 2.0]], Rise::Both);
        assert_eq!(noisy.seconds(), [[2.0, 2.0], [2.0, 3.0], [4.0, 4.0]]);
        let rows = table(vec![vec![2.0, 1.0], vec![1.0, 3.0], vec![4.0, 2.0]], Rise::Rows);
        assert_eq!(rows.seconds(), [[2.0, 1.0], [2.0, 3.0], [4.0, 3.0]]);
        assert!((rows.at(1.0, 9000.0) - 1.0).abs() < 1e-9, "the last column stands for all behind it");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let make = |rows: Vec<f64>, columns: Vec<f64>, seconds: Vec<Vec<f64>>| {
            Table::new(rows, columns, seconds, Rise::Both).expect_err("refused")
        };
        for (error, expected) in [
            (make(vec![], vec![0.0], vec![]), "has 0 points along the rows, must have 1 to 256"),
            (make(vec![1.0, 1.0], vec![0.0], vec![]), "does not rise along the rows"),
            (make(vec![1.0], vec![f64::NAN], vec![]), "has a point along the columns that is no size"),
            (make(vec![1.0], vec![0.0], vec![]), "has 0 rows of seconds, must have 1"),
            (make(vec![1.0], vec![0.0], vec![vec![]]), "has 0 seconds at 1, must have 1"),
            (make(vec![1.0], vec![0.0], vec![vec![-1.0]]), "says -1 at 1, which is no time"),
        ] {
            assert_eq!(error, expected);
        }
    }

    proptest! {
        #[test]
        fn more_work_never_takes_less_time(
            seconds in prop::collection::vec(prop::collection::vec(0.0..10.0_f64, 3), 4),
            row in 0.0..500.0_f64,
            column in 0.0..500.0_f64,
            more in 0.0..300.0_f64,
        ) {
            let (rows, columns) = (vec![1.0, 8.0, 64.0, 128.0], vec![0.0, 32.0, 200.0]);
            let both = Table::new(rows.clone(), columns.clone(), seconds.clone(), Rise::Both).expect("fits");
            let here = both.at(row, column);
            prop_assert!(both.at(row + more, column) >= here - 1e-9);
            prop_assert!(both.at(row, column + more) >= here - 1e-9);
            let only_rows = Table::new(rows, columns, seconds, Rise::Rows).expect("fits");
            prop_assert!(only_rows.at(row + more, column) >= only_rows.at(row, column) - 1e-9);
        }
    }
}
