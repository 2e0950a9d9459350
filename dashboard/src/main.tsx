import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { HttpBackend } from "./api/httpBackend";
import { App } from "./app/App";
import { readSettings } from "./app/settings";
import { Store } from "./store/store";
import "./styles/index.css";

const params = new URLSearchParams(window.location.search);

async function chooseBackend() {
  const wanted = params.get("demo");
  if (wanted === null || wanted === "0") return new HttpBackend();
  const { DemoBackend } = await import("./demo/demoBackend");
  return new DemoBackend(Number(params.get("workers") ?? 64));
}

async function start() {
  const { theme } = readSettings();
  const dark = theme === "system" ? window.matchMedia("(prefers-color-scheme: dark)").matches : theme === "dark";
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  const root = document.getElementById("root");
  if (!root) throw new Error("index.html has no #root");
  const store = new Store(await chooseBackend());
  createRoot(root).render(
    <StrictMode>
      <App store={store} />
    </StrictMode>,
  );
}

void start();
