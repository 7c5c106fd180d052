// Draws the charts of a report and, on a page of `watch`, brings them and the tables up to date.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
for (const [name, item] of Object.entries(data.charts)) {
  Bokeh.embed.embed_item(item, "chart-" + name);
}

// Paper cannot be unfolded: what is folded is opened for printing, and folded again.
let folded = [];
window.addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const part of folded) part.open = true;
});
window.addEventListener("afterprint", () => {
  for (const part of folded) part.open = false;
});

function showChanges(changes) {
  for (const [id, text] of Object.entries(changes.fragments)) {
    document.getElementById(id).innerHTML = text; // made by the server, which escapes all texts of the run
  }
  for (const [name, columns] of Object.entries(changes.columns)) {
    for (const drawn of Bokeh.documents) {
      const source = drawn.get_model_by_name(name);
      if (source !== null) source.data = columns;
    }
  }
}

async function follow() {
  let version = "";
  const status = document.getElementById("status");
  for (;;) {
    if (!document.hidden) {
      try {
        const answer = await fetch("changes?since=" + encodeURIComponent(version), {cache: "no-store"});
        if (answer.ok) {
          const changes = await answer.json();
          if (changes.version !== version) showChanges(changes);
          version = changes.version;
          status.textContent = changes.state === "not ended" ? "live" : changes.state;
        } else {
          status.textContent = await answer.text(); // why, such as a file that cannot be read
        }
      } catch (error) {
        status.textContent = "the server of this page does not answer";
      }
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}
if (data.live) follow();
