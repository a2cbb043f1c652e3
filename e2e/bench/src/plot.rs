//! Plots as SVG: ratios as bars around 1, and times between tokens as distributions. They carry their own colours for
//! light and for dark, and say in words what a colour says.

use crate::{
    loads::{Against, Better},
    results::{LoadResult, Results, Series},
    table,
};

/// The file with the ratios.
pub const RATIOS_FILE: &str = "ratios.svg";
/// Width of every plot.
const WIDTH: f64 = 960.0;

const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#52514e}.t{font-size:14px;font-weight:600;fill:#0b0b0b}\
    .v{fill:#0b0b0b}.bg{fill:#fcfcfb}.grid{stroke:#e4e3df}.axis{stroke:#898781}.aim{stroke:#0b0b0b;stroke-width:2}\
    .ours{fill:#2a78d6}.low{fill:#eb6834}path{fill:none;stroke-width:2;stroke-linejoin:round}\
    .p0{stroke:#2a78d6}.p1{stroke:#898781;stroke-dasharray:5 3}.p2{stroke:#eb6834}\
    @media(prefers-color-scheme:dark){text{fill:#c3c2b7}.t,.v{fill:#fff}.bg{fill:#1a1a19}.grid{stroke:#33332f}\
    .aim{stroke:#fff}.ours{fill:#3987e5}.low{fill:#d95926}.p0{stroke:#3987e5}.p2{stroke:#d95926}}";

/// The file's text with everything that XML reads otherwise written as it must be.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

struct Svg {
    width: f64,
    height: f64,
    body: String,
}

impl Svg {
    fn new(width: f64, height: f64) -> Self {
        Self { width, height, body: String::new() }
    }

    fn text(&mut self, x: f64, y: f64, class: &str, anchor: &str, text: &str) {
        let text = escaped(text);
        self.body +=
            &(format!(r#"<text x="{x:.1}" y="{y:.1}" class="{class}" text-anchor="{anchor}">{text}</text>"#) + "\n");
    }

    fn line(&mut self, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        self.body +=
            &(format!(r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#) + "\n");
    }

    fn bar(&mut self, class: &str, (from, to): (f64, f64), y: f64, height: f64) {
        let (x, width) = (from.min(to), (to - from).abs().max(1.0));
        let bar =
            format!(r#"<rect class="{class}" x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" rx="2"/>"#);
        self.body += &(bar + "\n");
    }

    fn path(&mut self, class: &str, points: &[(f64, f64)]) {
        let points = points
            .iter()
            .enumerate()
            .map(|(index, (x, y))| format!("{}{x:.1} {y:.1}", if index == 0 { "M" } else { "L" }));
        self.body += &(format!(r#"<path class="{class}" d="{}"/>"#, points.collect::<String>()) + "\n");
    }

    fn done(self, title: &str) -> String {
        let Self { width, height, body } = self;
        let title = escaped(title);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
             height=\"{height:.0}\" role=\"img\">\n<title>{title}</title>\n<style>{STYLE}</style>\n\
             <rect class=\"bg\" width=\"{width:.0}\" height=\"{height:.0}\"/>\n{body}</svg>\n"
        )
    }
}

/// A bar of the plot of ratios.
struct Bar {
    label: String,
    against: &'static str,
    /// How many times better than the peer.
    value: f64,
    /// How many times better it is to be.
    aim: f64,
    met: bool,
}

/// How many times better than the peer each figure is; the mark is the aim.
#[must_use]
pub fn ratios(results: &Results) -> String {
    const LEFT: f64 = 330.0;
    const RIGHT: f64 = 120.0;
    const TOP: f64 = 66.0;
    const ROW: f64 = 24.0;
    let bars: Vec<Bar> = results.loads.iter().flat_map(bars).collect();
    #[allow(clippy::cast_precision_loss)]
    let bottom = TOP + bars.len() as f64 * ROW;
    let mut svg = Svg::new(WIDTH, bottom + 34.0);
    let title = "Times better than llama-server (1 = as good; the mark is the aim)";
    svg.text(16.0, 26.0, "t", "start", title);
    svg.text(16.0, 44.0, "", "start", "Blue bars meet their aim, orange ones miss it. The scale is logarithmic.");
    let extremes = bars.iter().flat_map(|bar| [bar.value, bar.aim]);
    let (low, high) = extremes.fold((0.5_f64, 2.0_f64), |(low, high), value| (low.min(value), high.max(value)));
    let (low, high) = (low.log2().floor(), high.log2().ceil());
    let x = |value: f64| LEFT + (value.log2() - low) / (high - low) * (WIDTH - LEFT - RIGHT);
    let mut tick = low;
    while tick <= high {
        let at = x(tick.exp2());
        svg.line(if tick == 0.0 { "axis" } else { "grid" }, (at, TOP - 6.0), (at, bottom));
        svg.text(at, bottom + 18.0, "", "middle", &format!("{}x", tick.exp2()));
        tick += 1.0;
    }
    let mut y = TOP;
    for bar in &bars {
        svg.text(LEFT - 10.0, y + 15.0, "", "end", &format!("{} (to {})", bar.label, bar.against));
        svg.bar(if bar.met { "ours" } else { "low" }, (x(1.0), x(bar.value)), y + 4.0, ROW - 8.0);
        svg.line("aim", (x(bar.aim), y + 1.0), (x(bar.aim), y + ROW - 1.0));
        let end = x(bar.value).max(x(bar.aim)).max(x(1.0)) + 8.0;
        let missed = if bar.met { "" } else { " missed" };
        svg.text(end, y + 15.0, "v", "start", &format!("{:.2}x{missed}", bar.value));
        y += ROW;
    }
    svg.done(title)
}

fn bars(load: &LoadResult) -> Vec<Bar> {
    let bar = |verdict: crate::results::Verdict| {
        let against = match verdict.aim.against {
            Against::PeerDefault => "default",
            Against::PeerBest => "best",
            Against::BatchedBench => "batched-bench",
            Against::Itself => return None,
        };
        let better = |ratio: f64| if verdict.aim.better == Better::Higher { ratio } else { 1.0 / ratio };
        let value = better(verdict.ratio?);
        let label = format!("{}: {}", load.name, table::label(&verdict.aim.figure).0);
        (value.is_finite() && value > 0.0).then(|| Bar {
            label,
            against,
            value,
            aim: better(verdict.aim.bound),
            met: verdict.met,
        })
    };
    load.verdicts().into_iter().filter_map(bar).collect()
}

/// The distribution of a load's times between tokens. The vertical axis gives every nine the same room, for it is the
/// slow tokens that people see.
#[must_use]
pub fn times_between_tokens(load: &LoadResult) -> String {
    const LEFT: f64 = 70.0;
    const RIGHT: f64 = 905.0;
    const TOP: f64 = 76.0;
    const BOTTOM: f64 = 360.0;
    const NINES: f64 = 3.3;
    let all = [Some(&load.ours), load.peer_default.as_ref(), load.peer_best.as_ref()];
    let mut series: Vec<(usize, &Series)> = all
        .into_iter()
        .enumerate()
        .filter_map(|(index, series)| Some((index, series?)))
        .filter(|(_, series)| series.itl_ms.count > 0)
        .collect();
    // Where the peer is best as it comes, it is one line.
    let one = series.len() > 2;
    series.dedup_by(|b, a| a.1.name == b.1.name);
    let one = one && series.len() == 2;
    let mut svg = Svg::new(WIDTH, 404.0);
    let title = format!("{}: time between tokens", load.title);
    svg.text(16.0, 26.0, "t", "start", &title);
    let values = series.iter().flat_map(|(_, series)| &series.itl_ms.points).map(|(_, value)| value.max(0.01));
    let (low, high) = values.fold((f64::INFINITY, 1.0_f64), |(low, high), value| (low.min(value), high.max(value)));
    let (low, high) = (low.min(high).log10().floor(), (high * 1.01).log10().ceil());
    let x = |ms: f64| LEFT + (ms.max(0.01).log10() - low) / (high - low).max(1.0) * (RIGHT - LEFT);
    let y = |percent: f64| BOTTOM - (-(1.0 - percent / 100.0).max(1e-12).log10()).min(NINES) / NINES * (BOTTOM - TOP);
    let mut tick = low;
    while tick <= high {
        let ms = 10_f64.powf(tick);
        svg.line("grid", (x(ms), TOP), (x(ms), BOTTOM));
        svg.text(x(ms), BOTTOM + 18.0, "", "middle", &format!("{ms} ms"));
        tick += 1.0;
    }
    for percent in [0.0, 50.0, 90.0, 99.0, 99.9] {
        svg.line("grid", (LEFT, y(percent)), (RIGHT, y(percent)));
        svg.text(LEFT - 8.0, y(percent) + 4.0, "", "end", &format!("{percent}%"));
    }
    svg.line("axis", (LEFT, BOTTOM), (RIGHT, BOTTOM));
    svg.text(16.0, TOP - 12.0, "", "start", "tokens that come at least so soon");
    let mut legend = 300.0;
    for (index, series) in series {
        let class = format!("p{index}");
        let points: Vec<(f64, f64)> = series.itl_ms.points.iter().map(|(percent, ms)| (x(*ms), y(*percent))).collect();
        svg.path(&class, &points);
        svg.path(&class, &[(legend, TOP - 16.0), (legend + 24.0, TOP - 16.0)]);
        let name = match index {
            0 => "gantry".to_owned(),
            1 if one => "llama-server, default, which is its best".to_owned(),
            1 => "llama-server, default".to_owned(),
            _ => format!("llama-server, best ({})", series.name),
        };
        svg.text(legend + 30.0, TOP - 12.0, "", "start", &name);
        legend += 180.0;
    }
    svg.done(&title)
}
